"""The command `logs`: print the output of a job's ranks."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.errors import FleetError
from orchestrator.cli.terminal.output import Format, JobArgument, Output, print_message
from orchestrator.log_lines import line_source
from orchestrator.terminal_text import log_lines

if TYPE_CHECKING:
    from orchestrator.client.client import Client
    from orchestrator.views.jobs import JobView
    from orchestrator.views.logs import LogEvent, LogLine


def logs(
    ref: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log until the job ends")] = False,
    rank: Annotated[int | None, typer.Option(help="Rank whose lines are printed (default: all)", min=0)] = None,
    attempt: Annotated[
        int | None, typer.Option("--attempt", help="Attempt whose lines are printed (default: all)", min=0)
    ] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", help="Number of lines to print from the end of the log", min=0)
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Print the output of a job. With `-o json` one object per line.

    Exit code 3 if a part of the requested log is missing because its node does not respond. With
    `--follow` on a job that still runs this is a note on stderr: its new lines are printed.
    """
    from orchestrator.client.client import connect

    with connect(progress=print_message) as client:
        first = client.jobs.show(ref)
        ref = first["id"]  # resolve a name only once: later it may mean another job
        if follow:
            pages = follow_pages(client, ref, rank=rank, attempt=attempt, tail=tail)
            printed = print_lines((page["lines"] for page in pages), output)
        else:
            printed = print_lines(_pages(client, ref, rank=rank, attempt=attempt, tail=tail), output)
        if tail == 0:
            return
        view = client.jobs.show(ref)
        away = client.jobs.logs(ref, rank=rank, attempt=attempt, tail=tail or 0)["away"] if view["attempts"] else []
        if away and printed and follow and not first["ended_at"]:
            print_message(f"note: an earlier part of the log is missing: {'; '.join(away)}")
        elif away:
            raise FleetError(f"{'a part of the log is missing: ' if printed else ''}{'; '.join(away)}")
        elif not printed:
            _explain_empty_log(view, rank, attempt)


def follow_pages(client: "Client", ref: str, **where: Any) -> "Iterator[LogEvent]":
    """Yield pages of lines until the job ends. If the server is lost, the error says how to follow this job again."""
    from orchestrator.client.transport import ServerUnreachable

    try:
        yield from client.jobs.follow(ref, **where)
    except ServerUnreachable as e:
        raise FleetError(e.message, f"run `polyfleet logs -f {ref}`: it starts a server and continues the log") from e


def _pages(client: "Client", ref: str, *, tail: int | None, **where: Any) -> "Iterator[list[LogLine]]":
    """Yield all lines that exist now, or the last `tail` lines."""
    page = client.jobs.logs(ref, tail=tail, **where)
    yield page["lines"]
    while tail is None and page["lines"]:
        page = client.jobs.logs(ref, cursor=page["cursor"], **where)
        yield page["lines"]


def _explain_empty_log(view: "JobView", rank: int | None, attempt: int | None) -> None:
    if not view["attempts"]:
        status = "never ran" if view["ended_at"] else "has not run yet"
        print_message(f"{view['id']} {status}: {view['state']}" + (f", {view['reason']}" if view["reason"] else ""))
    else:
        only = "".join(f", {option} {n}" for option, n in (("rank", rank), ("attempt", attempt)) if n is not None)
        print_message(
            f"{view['id']}{only} has printed nothing{'' if view['ended_at'] else ' yet'}; its state is {view['state']}"
        )


class Printer:
    """Prints pages of lines as they arrive. Lines are prefixed with their rank once there is more than one rank. An
    unfinished line is printed without a line end; its rest is appended to it, or printed on a separate line if another
    line was printed in between.
    """

    def __init__(self, output: Format):
        self._output = output
        self._ranks: set[int] = set()
        self._open_line: tuple[int, int, str] | None = None  # source of the unfinished line at the cursor

    def print(self, lines: "list[LogLine]") -> None:
        from orchestrator.cli.terminal.output import write

        if lines:
            write("".join(map(self._format, lines)), end="")

    def close(self) -> None:
        """End the unfinished line at the cursor, if any."""
        from orchestrator.cli.terminal.output import write

        if self._open_line is not None:
            write("")
            self._open_line = None

    def _format(self, line: "LogLine") -> str:
        from orchestrator.cli.terminal.output import as_json, as_yaml

        if self._output is Format.JSON:
            return as_json(line, indent=None) + "\n"
        if self._output is Format.YAML:
            return as_yaml([line]) + "\n"
        return self._format_text(line)

    def _format_text(self, line: "LogLine") -> str:
        self._ranks.add(line["rank"])
        prefix = f"[{line['rank']}] " if len(self._ranks) > 1 else ""
        before, self._open_line = self._open_line, line_source(line) if line.get("unfinished") else None
        end = "" if line.get("unfinished") else "\n"
        if line.get("continues") and before == line_source(line):
            return "\n".join(log_lines(line["text"])) + end
        if line.get("continues") and not line["text"]:  # only the end of a line that another line follows
            self._open_line = before
            return ""
        line_break = "\n" if before is not None else ""
        return line_break + "\n".join(prefix + text for text in log_lines(line["text"])) + end


def print_lines(pages: "Iterable[list[LogLine]]", output: Format) -> int:
    """Print each page as it arrives. Return the number of lines."""
    printer, count = Printer(output), 0
    for lines in pages:
        count += len(lines)
        printer.print(lines)
    printer.close()
    return count

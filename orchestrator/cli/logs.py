"""The verb that shows what the ranks of a job wrote."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.errors import FleetError
from orchestrator.cli.output import Format, JobArgument, Output, print_message
from orchestrator.log_lines import source
from orchestrator.show.terminal_text import log_lines

if TYPE_CHECKING:
    from orchestrator.client import Client

Data = dict[str, Any]


def logs(
    ref: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log until the job ends")] = False,
    rank: Annotated[int | None, typer.Option(help="Rank whose lines are printed (default: all)", min=0)] = None,
    epoch: Annotated[
        int | None, typer.Option("--attempt", "--epoch", help="Attempt whose lines are printed (default: all)", min=0)
    ] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", help="Number of lines to print from the end of the log", min=0)
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Print the output of a job. With `-o json` one object per line.

    Exit code 3 if a part of the requested log is not shown because its node does not answer. With
    `--follow` on a job that still runs this is a note on stderr: its new lines are shown.
    """
    from orchestrator.client import connect

    with connect(progress=print_message) as client:
        first = client.job(ref)
        ref = first["id"]  # of a name, once: another job may be called so by the next page
        if follow:
            printed = print_lines(client.follow_log_pages(ref, rank=rank, epoch=epoch, tail=tail), output)
        else:
            printed = print_lines(_pages(client, ref, rank=rank, epoch=epoch, tail=tail), output)
        if tail == 0:
            return
        view = client.job(ref)
        away = client.logs(ref, rank=rank, epoch=epoch, tail=tail or 0)["away"] if view["attempts"] else []
        if away and printed and follow and not first["ended_at"]:
            print_message(f"note: an earlier part of the log is not shown: {'; '.join(away)}")
        elif away:
            raise FleetError(f"{'a part of the log is not shown: ' if printed else ''}{'; '.join(away)}")
        elif not printed:
            _say_why_nothing(view, rank, epoch)


def _pages(client: "Client", ref: str, *, tail: int | None, **where: Any) -> Iterator[list[Data]]:
    """Every line there is now, or the last `tail`."""
    page = client.logs(ref, tail=tail, **where)
    yield page["lines"]
    while tail is None and page["lines"]:
        page = client.logs(ref, cursor=page["cursor"], **where)
        yield page["lines"]


def _say_why_nothing(view: Data, rank: int | None, epoch: int | None) -> None:
    if not view["attempts"]:
        never = "never ran" if view["ended_at"] else "has not run yet"
        print_message(f"{view['id']} {never}: {view['state']}" + (f", {view['reason']}" if view["reason"] else ""))
    else:
        who = "".join(f", {what} {n}" for what, n in (("rank", rank), ("attempt", epoch)) if n is not None)
        print_message(
            f"{view['id']}{who} has printed nothing{'' if view['ended_at'] else ' yet'}; its state is {view['state']}"
        )


class Printer:
    """Prints pages of lines as they come. A rank is named once a job has shown more than one of them. An unfinished
    line is printed without its end; what then comes of it is put behind it, or on a line of its own if another was
    printed in between.
    """

    def __init__(self, output: Format):
        self._output = output
        self._ranks: set[int] = set()
        self._at: tuple[int, int, str] | None = None  # whose line the cursor stands in

    def print(self, lines: list[Data]) -> None:
        from orchestrator.cli.output import write

        if lines:
            write("".join(map(self._shown, lines)), end="")

    def close(self) -> None:
        """End the line in which the cursor stands."""
        from orchestrator.cli.output import write

        if self._at is not None:
            write("")
            self._at = None

    def _shown(self, line: Data) -> str:
        from orchestrator.cli.output import as_json, as_yaml

        if self._output is Format.JSON:
            return as_json(line, indent=None) + "\n"
        if self._output is Format.YAML:
            return as_yaml([line]) + "\n"
        return self._behind_cursor(line)

    def _behind_cursor(self, line: Data) -> str:
        self._ranks.add(line["rank"])
        prefix = f"[{line['rank']}] " if len(self._ranks) > 1 else ""
        before, self._at = self._at, source(line) if line.get("unfinished") else None
        end = "" if line.get("unfinished") else "\n"
        if line.get("continues") and before == source(line):
            return "\n".join(log_lines(line["text"])) + end
        if line.get("continues") and not line["text"]:  # only its end, and the cursor has left it
            self._at = before
            return ""
        broken = "\n" if before is not None else ""
        return broken + "\n".join(prefix + text for text in log_lines(line["text"])) + end


def print_lines(pages: Iterable[list[Data]], output: Format) -> int:
    """Each page as it comes; how many lines."""
    printer, count = Printer(output), 0
    for lines in pages:
        count += len(lines)
        printer.print(lines)
    printer.close()
    return count

"""Commands for submitted jobs: jobs, show, cancel, migrate, rename, explain, debug story."""

from typing import TYPE_CHECKING, Annotated, cast

import typer

from cluster.errors import UserError
from orchestrator.cli.terminal import completion_values
from orchestrator.cli.terminal.output import Format, JobArgument, JobArguments, Output, emit, print_message

if TYPE_CHECKING:
    from orchestrator.views.jobs import JobState

PAGE = 1000
"""Jobs per request of a list of all."""
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}

debug_app = typer.Typer(help="Show what the server did, and why.", no_args_is_help=True, rich_markup_mode=None)


def jobs(
    state: Annotated[
        list[str] | None,
        typer.Option("--state", help="Job state to list; repeatable", autocompletion=completion_values.states),
    ] = None,
    name: Annotated[str, typer.Option("--name", "-n", help="Job name or pattern, e.g. 'sweep-*'")] = "",
    since: Annotated[
        str, typer.Option("--since", help="Earliest submission: an age (2h, 7d) or a day (2026-11-20)")
    ] = "",
    limit: Annotated[int, typer.Option(help="Maximum number of jobs, newest first", min=1, max=10_000)] = 100,
    every: Annotated[bool, typer.Option("--all", help="List all jobs, without a limit")] = False,
    output: Output = Format.TABLE,
) -> None:
    """List the newest jobs, the newest last."""
    from orchestrator.client.client import connect
    from orchestrator.show.jobs import COLUMNS
    from orchestrator.show.jobs import jobs as job_table

    states = [_state(text) for text in state] if state else None
    fields = ",".join(COLUMNS) if output is Format.TABLE else ""
    since_s = parse_moment(since) if since else 0.0
    with connect(progress=print_message) as client:
        if every:
            pages = list(client.jobs.list_pages(state=states, name=name, since=since_s, fields=fields, limit=PAGE))
            job_rows = [job for page in reversed(pages) for job in page]
        else:
            job_rows = client.jobs.list(state=states, limit=limit, name=name, since=since_s, fields=fields)
    filters = [("--state", text) for text in state or ()] + [("--name", name), ("--since", since)]
    filter_text = " ".join(f"{option} {text!r}" for option, text in filters if text)
    emit(job_rows, output, lambda rows: job_table(rows, filter_text))


def parse_moment(text: str, option: str = "--since") -> float:
    """Unix time in seconds of an ISO 8601 day or time (UTC without a time zone), or of an age such as 2h."""
    import time
    from datetime import UTC, datetime

    if text[:-1].isascii() and text[:-1].isdigit() and text[-1] in UNITS_S:
        return time.time() - int(text[:-1]) * UNITS_S[text[-1]]
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        raise UserError(f"{option} {text!r} is not a time", "write 30m, 2h, 7d, or 2026-11-20") from None
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()


def _state(text: str) -> "JobState":
    from cluster.errors import nearest
    from orchestrator.core.states import State

    if text.upper() not in State.__members__:
        raise UserError(f"no state {text!r}", nearest(text.upper(), list(State.__members__)))
    return cast("JobState", text.upper())


def show(ref: JobArgument, output: Output = Format.TABLE) -> None:
    """Show one job: attempts, result, failure."""
    from orchestrator.client.client import connect
    from orchestrator.show.jobs import job

    with connect(progress=print_message) as client:
        emit(client.jobs.show(ref), output, job)


def cancel(refs: JobArguments, output: Output = Format.TABLE) -> None:
    """Cancel jobs. A job that has ended is not changed. If one of the jobs does not exist, none is cancelled."""
    from orchestrator.client.client import connect
    from orchestrator.show.table import TableStack

    with connect(progress=print_message) as client:
        before = {job["id"]: job for job in map(client.jobs.show, refs)}
        views = [client.jobs.cancel(job_id) for job_id in before]
    notes = {job_id: " (it had already ended)" if job["ended_at"] else "" for job_id, job in before.items()}
    lines = (f"{view['id']}: {view['state']}{notes[view['id']]}" for view in views)
    emit(views if len(refs) > 1 else views[0], output, lambda _: TableStack(tuple(lines)))


def migrate(
    ref: JobArgument,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="Target pool, device kind (tpu:v5e) or back end",
            metavar="KIND|POOL",
            autocompletion=completion_values.kind_or_pool,
        ),
    ],
    output: Output = Format.TABLE,
) -> None:
    """Move a job to other devices. It saves a checkpoint, stops, and continues there from its newest checkpoint.

    Without a recorded checkpoint it starts again from the beginning. The command prints which of the two will happen.
    """
    from orchestrator.client.client import connect
    from orchestrator.show.table import TableStack

    with connect(progress=print_message) as client:
        before = client.jobs.show(ref)
        if before["continues"]:
            print_message(f"{before['id']}: after a move it {before['continues']}")
        view = client.jobs.migrate(before["id"], to)
    emit(view, output, lambda view: TableStack((f"{view['id']}: {view['state']}",)))


def rename(
    ref: JobArgument,
    name: Annotated[str, typer.Argument(help="New name", metavar="NAME")],
    output: Output = Format.TABLE,
) -> None:
    """Give a job another name. A job that has ended keeps its own."""
    from orchestrator.client.client import connect
    from orchestrator.show.table import TableStack

    with connect(progress=print_message) as client:
        view = client.jobs.rename(ref, name)
    emit(view, output, lambda view: TableStack((f"{view['id']}: {view['name']}",)))


def explain(
    ref: JobArgument,
    changes: Annotated[
        list[str] | None,
        typer.Option("--if", help="Assumed change of the fleet, e.g. '+4 amd:MI300X', 'pool tpu down', 'node a up'"),
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Explain why a job runs where it does, or why it waits.

    For each candidate and node: fits, or the rule that refused it. With --if the output is for the fleet with that
    change, and includes what would change for other jobs. Repeat --if for several changes.
    """
    from orchestrator.client.client import connect
    from orchestrator.show.jobs import plan

    with connect(progress=print_message) as client:
        emit(client.jobs.explain(ref, changes=changes or ()), output, plan)


@debug_app.callback()
def debug() -> None:
    """Show what the server did, and why."""


@debug_app.command()
def story(ref: JobArgument, output: Output = Format.TABLE) -> None:
    """Print the events of a job, then each message after which the server changed its attempts or sent commands.

    A line has the number, time and text of a message, then the changes of states and the commands that followed from
    it. `tick` is the message of the clock, JOB.2 the second attempt of a job, and a part an attempt on one node;
    docs/reference/states.md explains the states. The server has the newest 10,000 lines, for all jobs, in memory. Times
    are UTC.
    """
    from orchestrator.client.client import connect
    from orchestrator.show.jobs import story as show_story

    with connect(progress=print_message) as client:
        emit(client.jobs.story(ref), output, show_story)

"""Verbs about jobs: submit, jobs, show, logs, cancel, migrate, explain."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any
from uuid import uuid4

import typer
from typer.core import TyperCommand

from cluster.errors import UserError
from orchestrator.cli.errors import CANCELLED, FAILED, OK
from orchestrator.cli.output import Format, Output, emit, say, waiting

if TYPE_CHECKING:
    from orchestrator.client import Client
    from orchestrator.spec import JobSpec

Data = dict[str, Any]
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
Ref = Annotated[
    str, typer.Argument(help="Job id, a unique prefix of one, or a name (the newest so called).", metavar="JOB")
]


class Task(StrEnum):
    PREPARE = "prepare"
    TRAIN = "train"
    BENCHMARK = "benchmark"
    RUN = "run"


class WithCommand(TyperCommand):
    """Keeps what stands after `--` apart, in `ctx.meta`: the parser itself would take it for more words."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else None
        ctx.meta["command"] = None if at is None else args[at + 1 :]
        return super().parse_args(ctx, args[:at])


def submit(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(help="Job files, or a command after `--`.", metavar="FILE... | -- COMMAND"),
    ] = None,
    name: Annotated[str, typer.Option("--name", "-n", help="What to call it.")] = "",
    env: Annotated[
        list[str] | None, typer.Option("--env", help="Variable for the job, K=V; may be repeated.", metavar="K=V")
    ] = None,
    accelerators: Annotated[
        str, typer.Option("--accelerators", help="Devices, e.g. nvidia:H100:8; replaces those of the file.")
    ] = "",
    pool: Annotated[str, typer.Option("--pool", help="Only nodes of this pool.")] = "",
    task: Annotated[Task | None, typer.Option("--task", help="Without a file: what to do.", show_choices=True)] = None,
    entry: Annotated[str, typer.Option("--entry", help="Without a file: file.py:function or module:function.")] = "",
    working_dir: Annotated[str, typer.Option("--working-dir", help="Without a file: folder to send along.")] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Wait for its end; the exit code tells how it ended.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print its log until its end; implies --wait.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would happen, submit nothing.")] = False,
    key: Annotated[
        str, typer.Option("--key", help="Asked again with the same key, it counts once. Made anew by default.")
    ] = "",
    output: Output = Format.TABLE,
) -> None:
    """Submit a job: from a file, or a command after `--`. It is durable once its id is printed.

    Several files, or several documents in a file (parted by `---`), are submitted together: all of them or none. No
    fleet need be up: jobs wait for one.
    """
    from orchestrator.cli import job_arguments
    from orchestrator.client import connect

    command = ctx.meta["command"]
    given = job_arguments.Given(
        words or [], command, name, env or [], accelerators, pool, task.value if task else "", entry, working_dir
    )
    specs = job_arguments.specs_of(given)
    if len(specs) > 1 and follow:
        raise UserError(f"--follow and {len(specs)} jobs", "follow one of them with `polyfleet logs -f JOB`")
    with connect(progress=say) as client:
        if dry_run:
            _show_plans(client, specs, output)
        elif len(specs) > 1:
            _submit_many(client, specs, key, wait, output)
        else:
            _submit_one(client, specs[0], key, (wait or follow, follow), output)


def _show_plans(client: "Client", specs: "list[JobSpec]", output: Format) -> None:
    from orchestrator import submission
    from orchestrator.show.grid import Stack
    from orchestrator.show.jobs import plan

    plans = [submission.plan(client, spec) for spec in specs]
    if len(plans) == 1:
        emit(plans[0], output, plan)
    else:
        emit(plans, output, lambda rows: Stack(tuple(plan(row) for row in rows)))


def _submit_one(client: "Client", spec: "JobSpec", key: str, ending: tuple[bool, bool], output: Format) -> None:
    """`ending`: whether to wait, whether to follow."""
    from orchestrator import submission

    wait, follow = ending
    with _accepted_once(key) as key, waiting(f"submitting {spec.name}"):
        view = submission.submit(client, spec, key)
    if not wait:
        _submitted(view, output)
        return
    say(f"submitted {view['id']}")
    _to_the_end(client, view["id"], follow, output)


def _submit_many(client: "Client", specs: "list[JobSpec]", key: str, wait: bool, output: Format) -> None:
    from orchestrator import submission
    from orchestrator.cli.errors import JOB_EXIT_CODES
    from orchestrator.show.grid import Stack

    with _accepted_once(key) as key, waiting(f"submitting {len(specs)} jobs"):
        ids = submission.submit_many(client, specs, key)
    emit(ids, output, lambda ids: Stack(tuple(ids)))
    if wait:
        codes = {JOB_EXIT_CODES[client.wait(job)["state"]] for job in ids}
        raise typer.Exit(next((code for code in (FAILED, CANCELLED) if code in codes), OK))


@contextmanager
def _accepted_once(key: str) -> Iterator[str]:
    """The key of this submission. Who interrupts it is told how to go on: it may have been accepted."""
    key = key or uuid4().hex
    try:
        yield key
    except KeyboardInterrupt:
        say(f"it may have been submitted; repeat the same with `--key {key}`: it counts once")
        raise


def _submitted(view: Data, output: Format) -> None:
    from orchestrator.show.grid import Stack

    if view["reason"] != "submitted":
        say(f"{view['id']}: {view['reason']}")
    emit(view, output, lambda v: Stack((v["id"],)))


def _to_the_end(client: "Client", job_id: str, follow: bool, output: Format) -> None:
    """Exit code as the job ended. Ctrl-C, or the loss of the server, leaves the job running and says so."""
    from cluster.errors import FleetError
    from orchestrator.cli.errors import JOB_EXIT_CODES
    from orchestrator.show.jobs import job

    try:
        if follow:
            _print_lines(client.follow_log_pages(job_id), output)
        with waiting(f"waiting for {job_id}") as update:
            view = client.wait(
                job_id, seen=lambda v: update(f"{v['id']}: {v['state'].lower()} {v['reason'] or ''}".rstrip())
            )
    except (KeyboardInterrupt, FleetError):
        say(f"{job_id} goes on; `polyfleet logs -f {job_id}` follows it, `polyfleet cancel {job_id}` ends it")
        raise
    if not follow:
        emit(view, output, job)
    if follow or view["state"] != "SUCCEEDED":
        _say_end(view)
    raise typer.Exit(JOB_EXIT_CODES[view["state"]])


def _say_end(view: Data) -> None:
    """After its log, which has the traceback of a failure already."""
    from orchestrator.show.jobs import failure

    say(f"{view['id']}: {view['state']}")
    if view["failure"]:
        say(f"  {failure(view['failure'])[0]}")
    elif view["reason"]:
        say(f"  {view['reason']}")


def jobs(
    state: Annotated[list[str] | None, typer.Option("--state", help="Only in this state; may be repeated.")] = None,
    name: Annotated[str, typer.Option("--name", "-n", help="Only of this name.")] = "",
    since: Annotated[
        str, typer.Option("--since", help="Submitted within this time (2h, 7d) or since a day (2026-11-20).")
    ] = "",
    limit: Annotated[int, typer.Option(help="The newest so many.", min=1, max=10_000)] = 100,
    every: Annotated[bool, typer.Option("--all", help="All of them, however many.")] = False,
    output: Output = Format.TABLE,
) -> None:
    """The newest jobs, the newest last."""
    from orchestrator.client import connect
    from orchestrator.show.jobs import COLUMNS
    from orchestrator.show.jobs import jobs as shown

    states = [_state(word) for word in state] if state else None
    fields = COLUMNS if output is Format.TABLE else ()
    since_s = _since(since) if since else 0.0
    with connect(progress=say) as client:
        if every:
            pages = list(client.job_pages(states, name=name, since_s=since_s, fields=fields))
            found = [job for page in reversed(pages) for job in page]
        else:
            found = client.jobs(states, limit, name=name, since_s=since_s, fields=fields)
        emit(found, output, shown)


def _since(text: str) -> float:
    """Seconds since 1970: of a day or time as ISO 8601 writes it (UTC unless said), or so long ago."""
    import time
    from datetime import UTC, datetime

    if text[:-1].isascii() and text[:-1].isdigit() and text[-1] in UNITS_S:
        return time.time() - int(text[:-1]) * UNITS_S[text[-1]]
    try:
        then = datetime.fromisoformat(text)
    except ValueError:
        raise UserError(f"--since {text!r} is not a time", "write 30m, 2h, 7d, or 2026-11-20") from None
    return (then if then.tzinfo else then.replace(tzinfo=UTC)).timestamp()


def _state(word: str) -> str:
    from cluster.errors import nearest
    from orchestrator.core.states import State

    if word.upper() not in State.__members__:
        raise UserError(f"no state {word!r}", nearest(word.upper(), list(State.__members__)))
    return word.upper()


def show(ref: Ref, output: Output = Format.TABLE) -> None:
    """Everything about one job: attempts, result, failure."""
    from orchestrator.client import connect
    from orchestrator.show.jobs import job

    with connect(progress=say) as client:
        emit(client.job(ref), output, job)


def logs(
    ref: Ref,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    rank: Annotated[int | None, typer.Option(help="Only this rank.", min=0)] = None,
    epoch: Annotated[int | None, typer.Option(help="Only this attempt.", min=0)] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", help="Only the last so many lines there are now.", min=0)
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """What a job printed. With `-o json` one object per line."""
    from orchestrator.client import connect

    with connect(progress=say) as client:
        if follow:
            printed = _print_lines(client.follow_log_pages(ref, rank=rank, epoch=epoch, tail=tail), output)
        else:
            printed = _print_lines(_pages(client, ref, rank=rank, epoch=epoch, tail=tail), output)
        if not printed and tail != 0:
            _say_why_nothing(client.job(ref), rank, epoch)


def _pages(client: "Client", ref: str, *, tail: int | None, **where: Any) -> Iterator[list[Data]]:
    """Every line there is now, or the last `tail`."""
    page = client.logs(ref, tail=tail, **where)
    yield page["lines"]
    while tail is None and page["lines"]:
        page = client.logs(ref, cursor=page["cursor"], **where)
        yield page["lines"]


def _say_why_nothing(view: Data, rank: int | None, epoch: int | None) -> None:
    if not view["attempts"]:
        say(f"{view['id']} never ran: {view['state']}" + (f", {view['reason']}" if view["reason"] else ""))
    else:
        who = "".join(f", {what} {n}" for what, n in (("rank", rank), ("attempt", epoch)) if n is not None)
        say(f"{view['id']}{who} has printed nothing; it is {view['state']}")


def _print_lines(pages: Iterable[list[Data]], output: Format) -> int:
    """Each page as it comes; how many lines. A rank is named once a job has shown more than one of them."""
    from orchestrator.cli.output import as_json, as_yaml, write
    from orchestrator.show.text import log_lines

    ranks: set[int] = set()

    def shown(line: Data) -> str:
        if output is Format.JSON:
            return as_json(line, indent=None)
        if output is Format.YAML:
            return as_yaml([line])
        ranks.add(line["rank"])
        prefix = f"[{line['rank']}] " if len(ranks) > 1 else ""
        return "\n".join(prefix + text for text in log_lines(line["text"]))

    count = 0
    for lines in pages:
        count += len(lines)
        if lines:
            write("\n".join(map(shown, lines)))
    return count


def cancel(ref: Ref, output: Output = Format.TABLE) -> None:
    """End a job. One that has ended already stays as it is."""
    from orchestrator.client import connect
    from orchestrator.show.grid import Stack

    with connect(progress=say) as client:
        before = client.job(ref)
        view = client.cancel(before["id"])
    note = ", it had ended already" if before["ended_at"] else ""
    emit(view, output, lambda view: Stack((f"{view['id']}: {view['state']}{note}",)))


def migrate(
    ref: Ref,
    to: Annotated[
        str, typer.Option("--to", help="A pool, a kind such as tpu:v5e, or a back end.", metavar="KIND|POOL")
    ],
    output: Output = Format.TABLE,
) -> None:
    """Move a job to other devices. It saves, stops, and goes on there from its checkpoint."""
    from orchestrator.client import connect
    from orchestrator.show.grid import Stack

    with connect(progress=say) as client:
        view = client.migrate(ref, to)
    emit(view, output, lambda view: Stack((f"{view['id']}: {view['state']}",)))


def explain(ref: Ref, output: Output = Format.TABLE) -> None:
    """Why a job runs where it does, or nowhere.

    Per candidate and devices: fits, or the rule that refused it.
    """
    from orchestrator.client import connect
    from orchestrator.show.jobs import plan

    with connect(progress=say) as client:
        emit(client.explain(ref), output, plan)

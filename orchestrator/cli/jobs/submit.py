"""The command `submit`: submit one or many jobs, from files or a command, and optionally wait for them."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import uuid4

import typer

from cluster.errors import FleetError, UserError
from orchestrator.cli.jobs.logs import follow_pages, print_lines
from orchestrator.cli.terminal import completion_values
from orchestrator.cli.terminal.errors import CANCELLED, FAILED, JOB_EXIT_CODES, OK
from orchestrator.cli.terminal.help_pages import WithExamples
from orchestrator.cli.terminal.output import Format, Output, emit, print_message, progress_line

if TYPE_CHECKING:
    from orchestrator.client.client import Client
    from orchestrator.spec.job_spec import JobSpec
    from orchestrator.views.jobs import JobView

Data = dict[str, Any]


class Task(StrEnum):
    PREPARE = "prepare"
    TRAIN = "train"
    BENCHMARK = "benchmark"
    RUN = "run"


class LaunchMode(StrEnum):
    NODE = "node"
    RANKS = "ranks"


class WithCommand(WithExamples):
    """Command class that stores the arguments after `--` in `ctx.meta`; the parser would treat them as job files."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else None
        ctx.meta["command"] = None if at is None else args[at + 1 :]
        return super().parse_args(ctx, args[:at])


JobFilesOrCommand = Annotated[
    list[str] | None, typer.Argument(help="Job files, or a command after `--`", metavar="FILE... | -- COMMAND")
]
Name = Annotated[str, typer.Option("--name", "-n", help="Job name (default: from the file or the command)")]
Env = Annotated[list[str] | None, typer.Option("--env", help="Environment variable, K=V; repeatable", metavar="K=V")]
EnvFile = Annotated[
    list[Path] | None,
    typer.Option("--env-file", help="File of environment variables in .env format; --env overrides it", metavar="FILE"),
]
DataMounts = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        help="Data mounted at MOUNT: a local path, POOL:PATH or s3://…; repeatable",
        metavar="URI:MOUNT",
    ),
]
Accelerators = Annotated[
    str,
    typer.Option(
        "--accelerators",
        help="Devices, e.g. nvidia:H100:8; overrides the job file",
        autocompletion=completion_values.accelerators,
    ),
]
Checkpoint = Annotated[
    str,
    typer.Option(
        "--checkpoint",
        help="File in $POLYFLEET_OUTPUT_DIR that the script saves and resumes from, e.g. ckpt.pt",
        metavar="PATH",
    ),
]
TaskName = Annotated[Task | None, typer.Option("--task", help="Task type, without a job file", show_choices=True)]
EntryOption = Annotated[
    str, typer.Option("--entry", help="Function to run, file.py:function or module:function, without a job file")
]
WorkingDir = Annotated[str, typer.Option("--working-dir", help="Folder to upload, without a job file")]
LaunchAs = Annotated[
    LaunchMode | None,
    typer.Option("--launch", help="Processes of the command: one per node, or per device as with torchrun"),
]
Pool = Annotated[
    str,
    typer.Option(
        "--pool", help="Pool in which the job runs (default: any that fits)", autocompletion=completion_values.pool
    ),
]
Key = Annotated[str, typer.Option("--key", help="Idempotency key: the same key submits the job once")]


def submit(
    ctx: typer.Context,
    files: JobFilesOrCommand = None,
    name: Name = "",
    env: Env = None,
    env_file: EnvFile = None,
    accelerators: Accelerators = "",
    pool: Pool = "",
    task: TaskName = None,
    entry: EntryOption = "",
    working_dir: WorkingDir = "",
    launch: LaunchAs = None,
    data: DataMounts = None,
    checkpoint: Checkpoint = "",
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the job: exit 0 if it succeeded, 1 failed, 4 cancelled")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the log until the job ends; implies --wait")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the placement that the job would get, without submitting it")
    ] = False,
    key: Key = "",
    output: Output = Format.TABLE,
) -> None:
    """Submit a job from a file, or a command after `--`. Once its id is printed, the job is stored durably.

    Several files, or several documents in a file (separated by `---`), are submitted together, all or none. If no fleet
    is up, jobs wait for one.
    """
    from orchestrator.cli.jobs import job_arguments
    from orchestrator.client.client import connect

    task_name = task.value if task else ""
    arguments = job_arguments.SubmitArguments(
        files or [], ctx.meta["command"], name, env or [], env_file or [], accelerators, pool, task_name, entry,
        working_dir, launch.value if launch else "", data or [], checkpoint,
    )  # fmt: skip
    specs = job_arguments.build_specs(arguments)
    if hint := job_arguments.missing_folder_hint(arguments, Path.cwd()):
        print_message(hint)
    if len(specs) > 1 and follow:
        raise UserError(
            f"--follow follows only one job; there are {len(specs)}",
            "submit them without it, then follow one with `polyfleet logs -f JOB`",
        )
    with connect(progress=print_message) as client:
        if dry_run:
            _show_plans(client, specs, output)
        elif len(specs) > 1:
            _submit_many(client, specs, key, wait, output)
        else:
            _submit_one(client, specs[0], key, (wait or follow, follow), output)


def _show_plans(client: "Client", specs: "list[JobSpec]", output: Format) -> None:
    from orchestrator.show.jobs import plan
    from orchestrator.show.table import TableStack
    from orchestrator.submission import submission

    plans = [submission.plan(client, spec) for spec in specs]
    if len(plans) == 1:
        emit(plans[0], output, plan)
    else:
        emit(plans, output, lambda rows: TableStack(tuple(plan(row) for row in rows)))


def _submit_one(client: "Client", spec: "JobSpec", key: str, ending: tuple[bool, bool], output: Format) -> None:
    """Submit one job. `ending`: whether to wait for its end, and whether to follow its log."""
    wait, follow = ending
    view = submit_job(client, spec, key)
    if not wait:
        print_submitted(view, output)
        return
    _wait_for_end(client, view["id"], follow, output)


def submit_job(client: "Client", spec: "JobSpec", key: str) -> "JobView":
    """Submit a job; return its view once it is stored durably."""
    from orchestrator.submission import submission

    with _idempotency_key(key) as key, progress_line(f"submitting {spec.name}") as update:
        return submission.submit(client, spec, key, update)


def _submit_many(client: "Client", specs: "list[JobSpec]", key: str, wait: bool, output: Format) -> None:
    from orchestrator.show.table import TableStack
    from orchestrator.submission import submission

    with _idempotency_key(key) as key, progress_line(f"submitting {len(specs)} jobs") as update:
        ids = submission.submit_many(client, specs, key, update)
    emit(ids, output, lambda ids: TableStack(tuple(ids)))
    if wait:
        codes = {JOB_EXIT_CODES[client.wait(job)["state"]] for job in ids}
        raise typer.Exit(next((code for code in (FAILED, CANCELLED) if code in codes), OK))


@contextmanager
def _idempotency_key(key: str) -> Iterator[str]:
    """Yield the idempotency key of this submission. On Ctrl-C, print how to repeat it safely, since the server may have
    accepted it.
    """
    key = key or uuid4().hex
    try:
        yield key
    except KeyboardInterrupt:
        print_message(f"the job may have been submitted: to repeat this safely, add `--key {key}` to the command")
        raise


def print_submitted(view: "JobView", output: Format) -> None:
    from orchestrator.show.table import TableStack

    if view["reason"] != "submitted":
        print_message(f"{view['id']}: {view['reason']}")
    emit(view, output, lambda v: TableStack((v["id"],)))


def _wait_for_end(client: "Client", job_id: str, follow: bool, output: Format) -> None:
    """Wait for the job's end and exit with its code. Ctrl-C, or the loss of the server, leaves the job running; a
    message says so.
    """
    try:
        print_message(f"submitted {job_id}")
        if follow:
            print_lines((page["lines"] for page in follow_pages(client, job_id)), output)
        with progress_line(f"waiting for {job_id}") as update:
            view = client.wait(
                job_id, on_update=lambda v: update(f"{v['id']}: {v['state'].lower()} {v['reason'] or ''}".rstrip())
            )
    except (KeyboardInterrupt, FleetError):
        follow_it, end_it = f"`polyfleet logs -f {job_id}`", f"`polyfleet cancel {job_id}`"
        print_message(f"Job {job_id} has not ended. Follow it with {follow_it}, end it with {end_it}")
        raise
    if not follow:
        from orchestrator.show.jobs import job

        emit(view, output, job)
    if follow or view["state"] != "SUCCEEDED":
        print_end(view)
    raise typer.Exit(JOB_EXIT_CODES[view["state"]])


def print_end(view: "JobView") -> None:
    """Print how the job ended, after its log, which already has the traceback of a failure."""
    from orchestrator.show.jobs import failure

    print_message(f"{view['id']}: {view['state']}")
    if view["failure"]:
        print_message(f"  {failure(view['failure'])[0]}")
    elif view["reason"]:
        print_message(f"  {view['reason']}")

"""The command `offer`: show where a job could run now, before it is submitted."""

import typer

from orchestrator.cli.jobs.submit import (
    Accelerators,
    Checkpoint,
    DataMounts,
    EntryOption,
    Env,
    EnvFile,
    JobFilesOrCommand,
    LaunchAs,
    Name,
    Pool,
    TaskName,
    WorkingDir,
)
from orchestrator.cli.terminal.output import Format, Output, emit, print_message


def offer(
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
    output: Output = Format.TABLE,
) -> None:
    """Show where a job could run now: wait, speed and price for each candidate, pool and kind.

    The best is first; the one that the planner would choose next is marked. The speed names its source: a benchmark,
    a job that reported it, a declaration, ended jobs or an estimate. It takes the arguments of `submit`, uses the same
    planner as `explain`, and submits nothing.
    """
    from orchestrator.cli.jobs import job_arguments
    from orchestrator.client.client import connect
    from orchestrator.show.jobs import offers
    from orchestrator.show.table import TableStack
    from orchestrator.submission import submission

    task_name = task.value if task else ""
    arguments = job_arguments.SubmitArguments(
        files or [], ctx.meta["command"], name, env or [], env_file or [], accelerators, pool, task_name, entry,
        working_dir, launch.value if launch else "", data or [], checkpoint,
    )  # fmt: skip
    specs = job_arguments.build_specs(arguments)
    with connect(progress=print_message) as client:
        results = [submission.offers(client, spec) for spec in specs]
    if len(results) == 1:
        emit(results[0], output, offers)
    else:
        emit(results, output, lambda each: TableStack(tuple(map(offers, each))))

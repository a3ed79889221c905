"""The verb `offer`: where a job could run now, before it is submitted."""

import typer

from orchestrator.cli.output import Format, Output, emit, print_message
from orchestrator.cli.submit import (
    Accelerators,
    Checkpoint,
    Entry,
    Env,
    EnvFile,
    LaunchAs,
    Name,
    Pool,
    Shown,
    TaskName,
    Words,
    WorkingDir,
)


def offer(
    ctx: typer.Context,
    words: Words = None,
    name: Name = "",
    env: Env = None,
    env_file: EnvFile = None,
    accelerators: Accelerators = "",
    pool: Pool = "",
    task: TaskName = None,
    entry: Entry = "",
    working_dir: WorkingDir = "",
    launch: LaunchAs = None,
    data: Shown = None,
    checkpoint: Checkpoint = "",
    output: Output = Format.TABLE,
) -> None:
    """Where a job could run now: per candidate, pool and kind the wait, the measured speed and the price.

    The best comes first, and the one that the next plan would take is marked. It takes the words of `submit`, asks the
    same planner as `explain`, and submits nothing.
    """
    from orchestrator import submission
    from orchestrator.cli import job_arguments
    from orchestrator.client import connect
    from orchestrator.show.jobs import offers
    from orchestrator.show.table import TableStack

    task_name = task.value if task else ""
    given = job_arguments.SubmitArguments(
        words or [], ctx.meta["command"], name, env or [], env_file or [], accelerators, pool, task_name, entry,
        working_dir, launch.value if launch else "", data or [], checkpoint,
    )  # fmt: skip
    specs = job_arguments.specs_of(given)
    with connect(progress=print_message) as client:
        told = [submission.offers(client, spec) for spec in specs]
    if len(told) == 1:
        emit(told[0], output, offers)
    else:
        emit(told, output, lambda each: TableStack(tuple(map(offers, each))))

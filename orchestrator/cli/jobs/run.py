"""The command `run`: submit one job, follow its log, and exit with its outcome."""

import os
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.errors import FleetError, UserError
from orchestrator.cli.jobs.logs import Printer, follow_pages
from orchestrator.cli.jobs.submit import (
    Accelerators,
    Checkpoint,
    DataMounts,
    Env,
    EnvFile,
    JobFilesOrCommand,
    Key,
    Name,
    Pool,
    print_end,
    print_submitted,
    submit_job,
)
from orchestrator.cli.terminal.errors import INTERRUPTED, JOB_EXIT_CODES
from orchestrator.cli.terminal.output import Format, print_message, progress_line

if TYPE_CHECKING:
    from orchestrator.cli.jobs.job_arguments import SubmitArguments
    from orchestrator.client.client import Client

CHOICES = "[c]ancel it, [k]eep it running and leave, or continue following (Enter)? "


def run(
    ctx: typer.Context,
    files: JobFilesOrCommand = None,
    name: Name = "",
    env: Env = None,
    env_file: EnvFile = None,
    accelerators: Accelerators = "",
    pool: Pool = "",
    data: DataMounts = None,
    working_dir: Annotated[
        str | None,
        typer.Option(
            "--working-dir",
            help="Folder to upload (default: the current one if the command names a file in it; '': none)",
        ),
    ] = None,
    checkpoint: Checkpoint = "",
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Print the job id and return while the job runs")
    ] = False,
    key: Key = "",
) -> None:
    """Run a command in the fleet as if it ran here: prints its output and exits with 0, 1 (failed) or 4 (cancelled).

    Ctrl-C prompts whether to cancel the job, leave it running or continue; a second Ctrl-C leaves it running. Without a
    terminal, Ctrl-C leaves it running at once.
    """
    from orchestrator.cli.jobs import job_arguments
    from orchestrator.client.client import connect

    command = ctx.meta["command"]
    _check_arguments(files or [], command)
    arguments = job_arguments.SubmitArguments(
        files or [], command, name, env or [], env_file or [], accelerators, pool,
        working_dir=_choose_folder(working_dir, command or []), data=data or [], checkpoint=checkpoint,
    )  # fmt: skip
    spec = _single_spec(arguments)
    with connect(progress=print_message) as client:
        view = submit_job(client, spec, key)
        if detach:
            print_submitted(view, Format.TABLE)
            print_message(_follow_hint(view["id"]))
            return
        print_message(f"submitted {view['id']}")
        _follow(client, view["id"])


def _check_arguments(files: list[str], command: list[str] | None) -> None:
    if not files and not command:
        raise UserError("no command", "write it after `--`: `polyfleet run --pool cpu -- python train.py`")
    if files and command is None and not Path(files[0]).exists():
        raise UserError(
            f"there is no job file {files[0]!r}", f"write a command after `--`: `polyfleet run -- {files[0]} …`"
        )


def _choose_folder(requested: str | None, command: list[str]) -> str:
    """The folder to upload: by default the current one if the command, e.g. `python train.py`, names a file in it."""
    from orchestrator.cli.jobs.job_arguments import find_needed_file

    if requested is not None:
        return requested
    if file_named := find_needed_file(command, Path.cwd()):
        print_message(
            f"uploading the current folder, because the command names {file_named}; --working-dir '' uploads none"
        )
        return "."
    return ""


def _single_spec(arguments: "SubmitArguments") -> Any:
    from orchestrator.cli.jobs import job_arguments

    specs = job_arguments.build_specs(arguments)
    if len(specs) != 1:
        raise UserError(
            f"`run` follows only one job; there are {len(specs)}", "submit them with `polyfleet submit --wait`"
        )
    return specs[0]


def _follow(client: "Client", job_id: str) -> None:
    """Follow the log, then exit with the code of the job's end."""
    try:
        with _interruptible() as following:
            _print_log(client, job_id, following)
            with progress_line(f"waiting for {job_id}"):
                view = client.wait(job_id)
    except KeyboardInterrupt:
        print_message(f"Job {job_id} has not ended. {_follow_hint(job_id)}")
        raise typer.Exit(INTERRUPTED) from None
    except FleetError:
        print_message(f"Job {job_id} has not ended. {_follow_hint(job_id)}")
        raise
    print_end(view)
    raise typer.Exit(JOB_EXIT_CODES[view["state"]])


def _print_log(client: "Client", job_id: str, following: "_InterruptDelay") -> None:
    """Print the log to its end; at Ctrl-C, prompt the user. Raises KeyboardInterrupt to leave the job running."""
    printer, cursor = Printer(Format.TABLE), None
    while True:
        try:
            for page in follow_pages(client, job_id, cursor=cursor):
                with following.delayed():
                    printer.print(page["lines"])
                    cursor = page["cursor"]
            printer.close()
            return
        except KeyboardInterrupt:
            printer.close()
            if not _can_prompt():
                raise
            if _prompt_user(job_id) == "cancel":
                print_message(f"cancelling {job_id}")
                client.jobs.cancel(job_id)


def _can_prompt() -> bool:
    """Return whether a prompt is possible: at a terminal, and without a pipe to a program, which Ctrl-C stops too."""
    piped = stat.S_ISFIFO(os.fstat(sys.stdout.fileno()).st_mode)
    return sys.stdin.isatty() and sys.stderr.isatty() and not piped


def _prompt_user(job_id: str) -> str:
    """Prompt the user; return "cancel" or "go on". Raises KeyboardInterrupt to leave the job running."""
    sys.stderr.write(f"\nJob {job_id} has not ended: {CHOICES}")
    sys.stderr.flush()
    line = sys.stdin.readline()
    choice = line.strip().lower()
    if not line or choice in ("k", "keep", "d", "detach"):
        raise KeyboardInterrupt
    return "cancel" if choice in ("c", "cancel") else "go on"


def _follow_hint(job_id: str) -> str:
    return f"Follow it with `polyfleet logs -f {job_id}`, end it with `polyfleet cancel {job_id}`"


class _InterruptDelay:
    """Delays Ctrl-C while a page is printed, so that no line is lost or printed twice. A second one is not delayed."""

    def __init__(self) -> None:
        self._printing = self._pending = False

    def handle_signal(self, _number: int, _frame: Any) -> None:
        if self._printing and not self._pending:
            self._pending = True
            return
        raise KeyboardInterrupt

    @contextmanager
    def delayed(self) -> Iterator[None]:
        self._printing = True
        try:
            yield
        finally:
            self._printing = False
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt


@contextmanager
def _interruptible() -> Iterator[_InterruptDelay]:
    following = _InterruptDelay()
    before = signal.signal(signal.SIGINT, following.handle_signal)
    try:
        yield following
    finally:
        signal.signal(signal.SIGINT, before)

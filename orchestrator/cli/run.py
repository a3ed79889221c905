"""The verb `run`: submit one job, follow its log, and end as it ends."""

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
from orchestrator.cli.errors import INTERRUPTED, JOB_EXIT_CODES
from orchestrator.cli.logs import Printer
from orchestrator.cli.output import Format, print_message, progress_line
from orchestrator.cli.submit import (
    Accelerators,
    Checkpoint,
    Env,
    EnvFile,
    Key,
    Name,
    Pool,
    Shown,
    Words,
    accepted,
    say_end,
    tell_submitted,
)

if TYPE_CHECKING:
    from orchestrator.cli.job_arguments import SubmitArguments
    from orchestrator.client import Client

CHOICES = "[c]ancel it, [k]eep it running and leave, or go on following (Enter)? "


def run(
    ctx: typer.Context,
    words: Words = None,
    name: Name = "",
    env: Env = None,
    env_file: EnvFile = None,
    accelerators: Accelerators = "",
    pool: Pool = "",
    data: Shown = None,
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
    """Run a command in the fleet as if it ran here: its output, then its exit code (0, 1 failed, 4 cancelled).

    Ctrl-C asks whether to cancel the job, to leave it running or to go on; a second one leaves it running. Without a
    terminal Ctrl-C leaves it running.
    """
    from orchestrator.cli import job_arguments
    from orchestrator.client import connect

    command = ctx.meta["command"]
    _refuse_unless_clear(words or [], command)
    given = job_arguments.SubmitArguments(
        words or [], command, name, env or [], env_file or [], accelerators, pool,
        working_dir=_folder(working_dir, command or []), data=data or [], checkpoint=checkpoint,
    )  # fmt: skip
    spec = _only(given)
    with connect(progress=print_message) as client:
        view = accepted(client, spec, key)
        if detach:
            tell_submitted(view, Format.TABLE)
            print_message(_how_to_go_on(view["id"]))
            return
        print_message(f"submitted {view['id']}")
        _follow(client, view["id"])


def _refuse_unless_clear(words: list[str], command: list[str] | None) -> None:
    if not words and not command:
        raise UserError("no command", "e.g. `polyfleet run --pool cpu -- python train.py`")
    if words and command is None and not Path(words[0]).exists():
        raise UserError(
            f"there is no job file {words[0]!r}", f"a command goes after `--`: `polyfleet run -- {words[0]} …`"
        )


def _folder(asked: str | None, command: list[str]) -> str:
    """What to send along. A command such as `python train.py` would not find its file elsewhere."""
    from orchestrator.cli.job_arguments import folder_needed

    if asked is not None:
        return asked
    if named := folder_needed(command, Path.cwd()):
        print_message(
            f"sending the current folder along, because the command names {named}; --working-dir '' sends none"
        )
        return "."
    return ""


def _only(given: "SubmitArguments") -> Any:
    from orchestrator.cli import job_arguments

    specs = job_arguments.specs_of(given)
    if len(specs) != 1:
        raise UserError(f"{len(specs)} jobs, and `run` follows one", "submit them with `polyfleet submit --wait`")
    return specs[0]


def _follow(client: "Client", job_id: str) -> None:
    """Ends the command as the job ended."""
    try:
        with _interruptible() as following:
            _print_log(client, job_id, following)
            with progress_line(f"waiting for {job_id}"):
                view = client.wait(job_id)
    except KeyboardInterrupt:
        print_message(f"Job {job_id} has not ended. {_how_to_go_on(job_id)}")
        raise typer.Exit(INTERRUPTED) from None
    except FleetError:
        print_message(f"Job {job_id} has not ended. {_how_to_go_on(job_id)}")
        raise
    say_end(view)
    raise typer.Exit(JOB_EXIT_CODES[view["state"]])


def _print_log(client: "Client", job_id: str, following: "_Following") -> None:
    """To its end, with a question at each Ctrl-C. Raises KeyboardInterrupt to leave the job running."""
    printer, cursor = Printer(Format.TABLE), None
    while True:
        try:
            for page in client.log_pages(job_id, cursor=cursor):
                with following.undisturbed():
                    printer.print(page["lines"])
                    cursor = page["cursor"]
            printer.close()
            return
        except KeyboardInterrupt:
            printer.close()
            if not _can_ask():
                raise
            if _asked(job_id) == "cancel":
                print_message(f"cancelling {job_id}")
                client.cancel(job_id)


def _can_ask() -> bool:
    """At a terminal, unless the output goes to a program, which Ctrl-C has reached as well."""
    piped = stat.S_ISFIFO(os.fstat(sys.stdout.fileno()).st_mode)
    return sys.stdin.isatty() and sys.stderr.isatty() and not piped


def _asked(job_id: str) -> str:
    """ "cancel" or "go on". Raises KeyboardInterrupt where the job is to be left running."""
    sys.stderr.write(f"\nJob {job_id} has not ended: {CHOICES}")
    sys.stderr.flush()
    answer = sys.stdin.readline()
    word = answer.strip().lower()
    if not answer or word in ("k", "keep", "d", "detach"):
        raise KeyboardInterrupt
    return "cancel" if word in ("c", "cancel") else "go on"


def _how_to_go_on(job_id: str) -> str:
    return f"Follow it with `polyfleet logs -f {job_id}`, end it with `polyfleet cancel {job_id}`"


class _Following:
    """Ctrl-C waits while a page is printed, so that no line is lost or printed twice; a second one does not wait."""

    def __init__(self) -> None:
        self._printing = self._asked = False

    def signalled(self, _number: int, _frame: Any) -> None:
        if self._printing and not self._asked:
            self._asked = True
            return
        raise KeyboardInterrupt

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        self._printing = True
        try:
            yield
        finally:
            self._printing = False
        if self._asked:
            self._asked = False
            raise KeyboardInterrupt


@contextmanager
def _interruptible() -> Iterator[_Following]:
    following = _Following()
    before = signal.signal(signal.SIGINT, following.signalled)
    try:
        yield following
    finally:
        signal.signal(signal.SIGINT, before)

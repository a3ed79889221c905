"""How a command ends: its exit code, and for errors two lines on stderr instead of a traceback."""

import errno
import os
import traceback
from datetime import UTC, datetime
from pathlib import Path

from cluster.errors import FleetError, PolyfleetError, UserError

OK = 0
FAILED = 1
CANCELLED = 4
INTERRUPTED = 130
BROKEN_PIPE = 141

EXIT_CODES = {
    0: "done; a job that was waited for succeeded",
    1: "the job failed, `doctor` has a finding to act on, or an internal error",
    2: "something you can correct: the command line, a file, a name",
    3: "the server or the fleet cannot serve now",
    4: "the job that was waited for was cancelled",
    130: "interrupted with Ctrl-C; jobs go on",
    141: "output pipe closed",
}
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
NO_RIGHT = (errno.EACCES, errno.EPERM, errno.EROFS)
JOB_EXIT_CODES = {"SUCCEEDED": OK, "FAILED": FAILED, "CANCELLED": CANCELLED}


def report(error: BaseException) -> int:
    """Tell `error` on stderr; the exit code."""
    from orchestrator.cli.output import print_message

    if isinstance(error, OSError):
        error = _of_this_machine(error) or error
    if isinstance(error, PolyfleetError):
        print_message(f"error: {error.message}")
        if error.remedy:
            print_message(f"  {error.remedy}")
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        print_message("interrupted")
        return INTERRUPTED
    print_message(f"error: {type(error).__name__}: {error}")
    print_message(f"  this is a fault of Polyfleet; the traceback is in {_keep_traceback(error)}")
    return FAILED


def _of_this_machine(error: OSError) -> PolyfleetError | None:
    """What a full disk, missing rights or a wrong home make of any command: not our fault. None for all else."""
    from cluster.paths import home

    where = Path(os.fsdecode(error.filename or home()))
    if error.errno in NO_ROOM:
        return FleetError(
            f"{where} cannot be written: {error.strerror}", "free space there, or set POLYFLEET_HOME elsewhere"
        )
    wrong_home = where == home() or (where.is_relative_to(home()) and error.errno == errno.ENOTDIR)
    if wrong_home or (error.filename and error.errno in NO_RIGHT):
        mine = wrong_home or where.is_relative_to(home())
        remedy = "set POLYFLEET_HOME to a folder of yours" if mine else "change its rights"
        return UserError(f"{where} cannot be used: {error.strerror}", remedy)
    return None


def _keep_traceback(error: BaseException) -> Path | str:
    from cluster.paths import home, private_dir

    name = f"cli-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{os.getpid()}.log"
    try:
        path = private_dir(home() / "logs") / name
        path.write_text("".join(traceback.format_exception(error)))
        return path
    except OSError as e:
        traceback.print_exception(error)
        return f"the lines above: {e.filename} cannot be written ({e.strerror})"
    except PolyfleetError as e:
        traceback.print_exception(error)
        return f"the lines above: {e.message}"

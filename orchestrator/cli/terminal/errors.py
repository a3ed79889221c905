"""Exit codes of commands, and error messages: two lines on stderr instead of a traceback."""

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
    0: "success; if the command waited for a job, the job succeeded",
    1: "the job failed, `doctor` detected a problem, or an internal error occurred",
    2: "an error in the command line, a file or a name, which you can correct",
    3: "the server or the fleet is not available now",
    4: "the job for which the command waited was cancelled",
    130: "interrupted with Ctrl-C; jobs keep running",
    141: "output pipe closed",
}
DISK_FULL_CODES = (errno.ENOSPC, errno.EDQUOT)
PERMISSION_CODES = (errno.EACCES, errno.EPERM, errno.EROFS)
JOB_EXIT_CODES = {"SUCCEEDED": OK, "FAILED": FAILED, "CANCELLED": CANCELLED}


def print_error(error: BaseException) -> int:
    """Print `error` to stderr. Return the exit code."""
    from orchestrator.cli.terminal.output import print_message

    if isinstance(error, OSError):
        error = _environment_error(error) or error
    if isinstance(error, PolyfleetError):
        print_message(f"error: {error.message}")
        if error.remedy:
            print_message(f"  {error.remedy}")
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        print_message("interrupted")
        return INTERRUPTED
    print_message(f"error: {type(error).__name__}: {error}")
    print_message(f"  this is a bug in Polyfleet; open an issue with the traceback in {_store_traceback(error)}")
    return FAILED


def _environment_error(error: OSError) -> PolyfleetError | None:
    """The error for a full disk, missing permissions or a wrong home, which are not bugs; None for any other error."""
    from cluster.paths import home

    where = Path(os.fsdecode(error.filename or home()))
    if error.errno in DISK_FULL_CODES:
        what = where if error.filename else "a file"
        other = "set POLYFLEET_HOME to a folder" if where.is_relative_to(home()) else "name a target"
        return FleetError(f"{what} cannot be written: {error.strerror}", f"free disk space, or {other} on another disk")
    wrong_home = where == home() or (where.is_relative_to(home()) and error.errno == errno.ENOTDIR)
    if wrong_home or (error.filename and error.errno in PERMISSION_CODES):
        is_in_home = wrong_home or where.is_relative_to(home())
        remedy = "set POLYFLEET_HOME to a folder that you own" if is_in_home else "change its permissions"
        return UserError(f"{where} cannot be used: {error.strerror}", remedy)
    return None


def _store_traceback(error: BaseException) -> Path | str:
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

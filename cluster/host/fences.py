"""Local copies of the jobs' fences, which agents read while Ray's head does not respond.

A fence is the newest epoch of a job; an attempt of an older epoch has no effect. There is one file per job, named by
the job's id, with the epoch in decimal digits and a newline. It is not synced to disk: no attempt outlives its machine.
"""

import os
import re
from pathlib import Path

from cluster.errors import UserError
from cluster.input.untrusted_files import UnreadableFile, open_untrusted_in
from cluster.paths import home, private_dir

JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
TEXT = re.compile(rb"(0|[1-9][0-9]{0,17})\n")
MAX_FENCE_BYTES = 19


def local_folder() -> Path:
    """Return the folder of fences in this home, which only its owner can read."""
    return private_dir(home() / "fences")


def raise_to(folder: Path, job: str, epoch: int) -> None:
    """Raise the job's fence to `epoch`, unless it is higher already. See `write`."""
    try:
        current = read(folder, job)
    except UnreadableFile:
        current = None
    if current is None or current < epoch:
        write(folder, job, epoch)


def write(folder: Path, job: str, epoch: int) -> None:
    """Set the job's fence to `epoch`, whatever it was. One writer at a time: the controller.

    An invalid file is replaced. Raises OSError, and UserError if `job` cannot be a job's id.
    """
    _check_job_id(job)
    part = folder / f".{job}.part"
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(b"%d\n" % epoch)
    part.replace(folder / job)


def read(folder: Path, job: str) -> int | None:
    """Return the job's fence, or None if none was written. Raises UnreadableFile for an invalid file."""
    _check_job_id(job)
    try:
        with open_untrusted_in(folder, job) as file:
            text = os.read(file, MAX_FENCE_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as e:
        raise UnreadableFile(str(folder / job), f"cannot be read: {e.strerror}", is_transient=True) from None
    if not TEXT.fullmatch(text):
        raise UnreadableFile(str(folder / job), "does not contain an epoch")
    return int(text)


def remove(folder: Path, job: str) -> None:
    """Remove the fence of a job whose attempts have all ended."""
    _check_job_id(job)
    (folder / job).unlink(missing_ok=True)


def _check_job_id(job: str) -> None:
    if not JOB.fullmatch(job):
        raise UserError(f"{job[:200]!r} cannot be a job's id", "use letters, digits, `.`, `_` and `-`")

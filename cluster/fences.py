"""The newest epoch of each job in a folder of this machine: agents read it where Ray's head does not answer.

One file per job, named by the job, which holds the epoch in decimal digits and a newline. Nothing of an older epoch is
effective. It is not written durably: no attempt outlives its machine.
"""

import os
import re
from pathlib import Path

from cluster.errors import UserError
from cluster.paths import home, private_dir
from cluster.untrusted_files import UnreadableFile, open_untrusted_in

JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
TEXT = re.compile(rb"(0|[1-9][0-9]{0,17})\n")
LONGEST_BYTES = 19


def local_folder() -> Path:
    """That of this home, open to its owner only."""
    return private_dir(home() / "fences")


def raise_to(folder: Path, job: str, epoch: int) -> None:
    """Let the job's fence be `epoch`, unless it is higher already. See `write`."""
    try:
        known = read(folder, job)
    except UnreadableFile:
        known = None
    if known is None or known < epoch:
        write(folder, job, epoch)


def write(folder: Path, job: str, epoch: int) -> None:
    """Let the job's fence be `epoch`, whatever it was. One writer at a time: the controller.

    What holds something else is replaced. Raises UserError for what is no job's id, OSError.
    """
    _checked(job)
    part = folder / f".{job}.part"
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(b"%d\n" % epoch)
    part.replace(folder / job)


def read(folder: Path, job: str) -> int | None:
    """The job's fence; None where none was written. Raises UnreadableFile for anything but a plain file of that
    form.
    """
    _checked(job)
    try:
        with open_untrusted_in(folder, job) as file:
            text = os.read(file, LONGEST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as e:
        raise UnreadableFile(str(folder / job), f"cannot be read: {e.strerror}", passing=True) from None
    if not TEXT.fullmatch(text):
        raise UnreadableFile(str(folder / job), "does not hold an epoch")
    return int(text)


def remove(folder: Path, job: str) -> None:
    """Of a job of which nothing can run any more."""
    _checked(job)
    (folder / job).unlink(missing_ok=True)


def _checked(job: str) -> None:
    if not JOB.fullmatch(job):
        raise UserError(f"{job[:200]!r} cannot be a job's id", "use letters, digits, `.`, `_` and `-`")

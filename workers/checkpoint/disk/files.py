"""The few file operations a save makes, as an object, so that a test can stop the world at any one of them.

Large files bypass the page cache (O_DIRECT): a copy into it costs more than the disk does. Where a mount refuses that
(some network and overlay file systems), the same file goes on buffered; nothing else changes.
"""

import errno
import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = 4096
"""What O_DIRECT wants offsets, lengths and memory to be multiples of; more than most disks ask for."""
DIRECT_FROM_BYTES = 1 << 20
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)


def rounded_up(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(slots=True)
class Writing:
    """A file being written, from several threads, at any offset."""

    descriptor: int
    path: Path
    size_bytes: int
    direct: bool

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Files:
    """Operations on a local file system. Modes follow the umask: other pods and users can read what this one saved."""

    def make_folder(self, folder: Path) -> None:
        folder.mkdir()

    def create(self, path: Path, size_bytes: int) -> Writing:
        """A new file with room for `size_bytes`; an existing one is an error, so nothing is ever overwritten."""
        file = _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, size_bytes)
        if file.direct:
            _reserve(file)
        return file

    def write(self, file: Writing, buffer: memoryview, size_bytes: int, offset: int) -> None:
        """The first `size_bytes` of `buffer`, which has room up to the next page, at a page boundary of the file."""
        done = 0
        while done < size_bytes:
            data = buffer[done : rounded_up(size_bytes)] if file.direct else buffer[done:size_bytes]
            try:
                done += os.pwrite(file.descriptor, data, offset + done)
            except OSError as e:
                if not file.direct or e.errno != errno.EINVAL:
                    raise
                _go_on_buffered(file)
            if file.direct and done % PAGE_BYTES and done < size_bytes:
                _go_on_buffered(file)  # a short write left us between pages

    def finish(self, file: Writing) -> None:
        """Exactly as long as it should be, and durable."""
        if os.fstat(file.descriptor).st_size != file.size_bytes:
            os.ftruncate(file.descriptor, file.size_bytes)
        os.fsync(file.descriptor)
        file.close()

    def open_or_create(self, path: Path, size_bytes: int) -> Writing:
        """A file that may have been written in part before, for reading too. Between writes that end it may be longer,
        up to the next page.
        """
        file = _opened(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, size_bytes)
        if os.fstat(file.descriptor).st_size > size_bytes:
            os.ftruncate(file.descriptor, size_bytes)
        return file

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        old.rename(new)

    def sync_folder(self, folder: Path) -> None:
        """Make the names in `folder` durable: a file's fsync does not."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, folder: Path) -> None:
        folder.rmdir()


def _opened(path: Path, flags: int, size_bytes: int) -> Writing:
    direct = _O_DIRECT if size_bytes >= DIRECT_FROM_BYTES else 0
    try:
        return Writing(os.open(path, flags | direct, 0o666), path, size_bytes, bool(direct))
    except OSError as e:
        if not direct or e.errno != errno.EINVAL:
            raise
    if flags & os.O_EXCL:
        with suppress(FileNotFoundError):  # some systems make it before they refuse
            path.unlink()
    return Writing(os.open(path, flags, 0o666), path, size_bytes, False)


def write_file(files: Files, path: Path, data: bytes) -> None:
    """A small file, whole and durable. The name's durability is the caller's."""
    file = files.create(path, len(data))
    try:
        padded = memoryview(bytearray(rounded_up(len(data))))
        padded[: len(data)] = data
        if file.direct:
            _go_on_buffered(file)  # a bytearray begins anywhere
        files.write(file, padded, len(data), 0)
        files.finish(file)
    finally:
        file.close()


def read_at_page(file: Writing, out: memoryview, offset: int) -> int:
    """Bytes read from a page boundary on into memory that begins at one and has whole pages; fewer only at the end."""
    try:
        return os.preadv(file.descriptor, [out], offset)
    except OSError as e:
        if not file.direct or e.errno != errno.EINVAL:
            raise
    _go_on_buffered(file)
    return os.preadv(file.descriptor, [out], offset)


def _reserve(file: Writing) -> None:
    """One extent instead of many, and a full disk noticed before the work. Not every file system can."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(file.descriptor, 0, rounded_up(file.size_bytes))
    except OSError as e:
        if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            file.close()
            raise


def _go_on_buffered(file: Writing) -> None:
    """O_DIRECT is a flag of the open file and can be taken back."""
    flags = fcntl.fcntl(file.descriptor, fcntl.F_GETFL)
    fcntl.fcntl(file.descriptor, fcntl.F_SETFL, flags & ~_O_DIRECT)
    file.direct = False

"""Read files of torch.save: zip archives with uncompressed tensors, each of which is read directly from the archive.

CRCs are checked; torch itself ignores them.
"""

import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

from cluster.input import sandbox
from workers.checkpoint.exchange.pickles import pickle_symbols
from workers.checkpoint.exchange.pickles.tensors import Storage, item_bytes, storage_dtype
from workers.checkpoint.format.manifest_checks import open_regular
from workers.checkpoint.format.message_text import key_text
from workers.errors import CheckpointError

READ_BYTES = 4 << 20
MAX_DIRECTORY_BYTES = 8 << 20
"""Maximum size of the archive's list of entries: some 90,000 storages, for which zipfile needs ten times as much."""
UNREADABLE = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, KeyError, NotImplementedError),
    *(ValueError, OverflowError, OSError, RuntimeError),  # undecodable names, invalid offsets, encryption
)


class Archive:
    """One archive, possibly part of a larger file, as in DCP. Offsets of storages count from the start of the file."""

    def __init__(self, path: Path, start: int = 0, size_bytes: int | None = None):
        self.path, self._start = path, start
        with os.fdopen(open_regular(path), "rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            window = _Window(file, start, file_bytes - start if size_bytes is None else size_bytes)
            self._check_magic(file, start)
            try:
                with zipfile.ZipFile(window) as archive:
                    self._entries = {info.filename: info for info in archive.infolist()}
                    self._check_entries(archive.infolist(), window.size_bytes)
                    self._prefix = self._find_prefix()
                    self._check_order(archive)
                    window.max_read_bytes = pickle_symbols.MAX_PICKLE_BYTES
                    pickled = archive.read(self._pickle)
                    self.value = pickle_symbols.read(pickled, str(path), self._storage(file))
                for info in self._entries.values():
                    _check_crc(path, file, self._start + self._data_offset(file, info), info)
            except UNREADABLE as e:
                raise CheckpointError(f"{path} is damaged: {e!s:.200}", "copy it again from its source") from e

    @property
    def pickle_bytes(self) -> int:
        return self._entries[self._pickle].file_size

    @property
    def _pickle(self) -> str:
        return f"{self._prefix}data.pkl"

    def _check_entries(self, entries: list[zipfile.ZipInfo], size_bytes: int) -> None:
        """Check entries before any is read: torch.save compresses nothing, and no two entries share bytes."""
        for info in entries:
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
                raise CheckpointError(
                    f"{self.path}: {info.filename:.200} is compressed, which torch.save never does",
                    "load it with torch and save it again",
                )
        if len(self._entries) != len(entries) or sum(info.file_size for info in entries) > size_bytes:
            raise CheckpointError(
                f"{self.path} has entries that overlap", "do not use this file: no standard program writes such files"
            )
        if (pickles := [i for i in entries if i.filename.endswith("data.pkl")]) and (
            pickles[0].file_size > pickle_symbols.MAX_PICKLE_BYTES
        ):
            raise CheckpointError(
                f"{self.path} has a pickle of {pickles[0].file_size} bytes",
                f"at most {pickle_symbols.MAX_PICKLE_BYTES} are read",
            )
        sandbox.raise_limits(metadata_bytes=sum(i.file_size for i in pickles), data_bytes=size_bytes)

    def _check_magic(self, file: IO[bytes], start: int) -> None:
        if os.pread(file.fileno(), 4, start) != b"PK\x03\x04":
            raise CheckpointError(
                f"{self.path} is not a file of torch.save: it is neither a zip archive nor torch's older format",
                "load it with the program that wrote it and save it again, or export it as safetensors",
            )

    def _find_prefix(self) -> str:
        names = [name for name in self._entries if name.endswith("/data.pkl") or name == "data.pkl"]
        if len(names) != 1:
            raise CheckpointError(
                f"{self.path} has {len(names)} entries data.pkl; files of torch.save have 1",
                "save the state dict with torch.save: TorchScript files cannot be imported",
            )
        return names[0].removesuffix("data.pkl")

    def _check_order(self, archive: zipfile.ZipFile) -> None:
        name = f"{self._prefix}byteorder"
        if name in self._entries and archive.read(name) != b"little":
            raise CheckpointError(f"{self.path} is big-endian", "save it on a little-endian machine")

    def _storage(self, file: IO[bytes]) -> Any:
        dtypes: dict[str, str] = {}

        def persistent(pid: Any) -> Storage:
            kind, storage_class, key, device, count = pid if isinstance(pid, tuple) and len(pid) == 5 else (None,) * 5
            dtype = storage_dtype(pickle_symbols.name_of(storage_class))
            info = self._entries.get(f"{self._prefix}data/{key}") if isinstance(key, str | int) else None
            if kind != "storage" or dtype is None or info is None or type(count) is not int or type(device) is not str:
                raise CheckpointError(
                    f"{self.path} refers to a storage {key_text(key)[:80]} that it does not have",
                    "check that the file is complete, then run it again",
                )
            if dtypes.setdefault(str(key), dtype) != dtype:
                raise CheckpointError(
                    f"{self.path}: storage {key} is used as {dtypes[str(key)]} and as {dtype}",
                    "save the tensors separately, with .clone(): torch.load would read both with one dtype",
                )
            if count * item_bytes(dtype) != info.file_size:
                raise CheckpointError(
                    f"{self.path}: storage {key} has {info.file_size} bytes, its pickle declares {count} {dtype}"
                )
            offset = self._start + self._data_offset(file, info)
            return Storage(str(self.path), offset, info.file_size, dtype, device, f"{self.path}:{offset}")

        return persistent

    def _data_offset(self, file: IO[bytes], info: zipfile.ZipInfo) -> int:
        header = os.pread(file.fileno(), 30, self._start + info.header_offset)
        if len(header) != 30:
            raise CheckpointError(
                f"{self.path} is cut off before {info.filename:.200}", "copy it again from its source"
            )
        name_bytes, extra_bytes = struct.unpack_from("<HH", header, 26)
        return int(info.header_offset + 30 + name_bytes + extra_bytes)


def _check_crc(path: Path, file: IO[bytes], offset: int, info: zipfile.ZipInfo) -> None:
    crc, remaining_bytes = 0, info.compress_size
    while remaining_bytes:
        data = os.pread(file.fileno(), min(remaining_bytes, READ_BYTES), offset + info.compress_size - remaining_bytes)
        if not data:
            raise CheckpointError(f"{path} is cut off within {info.filename}", "copy it again from its source")
        crc, remaining_bytes = zlib.crc32(data, crc), remaining_bytes - len(data)
    if crc != info.CRC:
        raise CheckpointError(
            f"{path}: {info.filename} does not match its CRC-32: its data changed", "copy it again from its source"
        )


class _Window:
    """A part of a file as a file of its own.
    `zipfile` reads the list of entries at once, however long it is declared to be, so one read returns at most
    `max_read_bytes`.
    """

    max_read_bytes = MAX_DIRECTORY_BYTES

    def __init__(self, file: IO[bytes], start: int, size_bytes: int):
        self._file, self._start, self.size_bytes, self._at = file, start, size_bytes, 0
        if start < 0 or size_bytes < 0:
            raise CheckpointError(
                f"an archive of {size_bytes} bytes from {start} on",
                "check that the file is complete, then run it again",
            )

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max({0: 0, 1: self._at, 2: self.size_bytes}[whence] + offset, 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def read(self, count: int = -1) -> bytes:
        remaining_bytes = max(self.size_bytes - self._at, 0)
        read_bytes = remaining_bytes if count < 0 else min(count, remaining_bytes)
        if read_bytes > self.max_read_bytes:
            raise zipfile.BadZipFile(
                f"its list of entries has {read_bytes} bytes, at most {self.max_read_bytes} are read"
            )
        data = os.pread(self._file.fileno(), read_bytes, self._start + self._at)
        self._at += len(data)
        return data

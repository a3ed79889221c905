"""A file of torch.save: a zip archive whose tensors lie uncompressed, so each is read where it is. CRCs are checked:
torch itself does not look at them."""

import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

from workers.checkpoint.exchange import symbols
from workers.checkpoint.exchange.values import Storage
from workers.checkpoint.format.checks import open_regular
from workers.checkpoint.format.dtypes import DTYPES
from workers.errors import CheckpointError

AT_ONCE_BYTES = 4 << 20
UNREADABLE = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, KeyError, NotImplementedError),
    *(ValueError, OverflowError, OSError, RuntimeError),  # names in no encoding, offsets that are none, encryption
)
_TYPED = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8",
}  # fmt: skip


class Archive:
    """One archive, possibly a part of a larger file, as DCP has them. Storages count from the file's beginning."""

    def __init__(self, path: Path, start: int = 0, size_bytes: int | None = None):
        self.path, self._start = path, start
        with os.fdopen(open_regular(path), "rb") as file:
            whole_bytes = os.fstat(file.fileno()).st_size
            window = _Window(file, start, whole_bytes - start if size_bytes is None else size_bytes)
            self._check_magic(file, start)
            try:
                with zipfile.ZipFile(window) as archive:
                    self._entries = {info.filename: info for info in archive.infolist()}
                    self._prefix = self._find_prefix()
                    self._check_order(archive)
                    self.value = symbols.read(archive.read(f"{self._prefix}data.pkl"), str(path), self._storage(file))
                for info in self._entries.values():
                    _check_crc(path, file, self._start + self._data_offset(file, info), info)
            except UNREADABLE as e:
                raise CheckpointError(f"{path} is damaged: {e}", "copy it again from its source") from e

    def _check_magic(self, file: IO[bytes], start: int) -> None:
        if os.pread(file.fileno(), 4, start) != b"PK\x03\x04":
            raise CheckpointError(
                f"{self.path} is not a file of torch.save since torch 1.6 (no zip archive)",
                "load it with the torch it was made with and save it again, or export it as safetensors",
            )

    def _find_prefix(self) -> str:
        found = [name for name in self._entries if name.endswith("/data.pkl") or name == "data.pkl"]
        if len(found) != 1:
            raise CheckpointError(
                f"{self.path} has {len(found)} entries data.pkl",
                "one of torch.save has one; TorchScript is not read",
            )
        return found[0].removesuffix("data.pkl")

    def _check_order(self, archive: zipfile.ZipFile) -> None:
        name = f"{self._prefix}byteorder"
        if name in self._entries and archive.read(name) != b"little":
            raise CheckpointError(f"{self.path} is big-endian", "save it on a little-endian machine")

    def _storage(self, file: IO[bytes]) -> Any:
        def persistent(pid: Any) -> Storage:
            kind, typed, key, device, count = pid[:5]
            dtype = _TYPED.get(symbols.name_of(typed).rpartition(".")[2])
            info = self._entries.get(f"{self._prefix}data/{key}")
            if kind != "storage" or dtype is None or info is None or not isinstance(count, int):
                raise CheckpointError(
                    f"{self.path} refers to a storage {pid!r:.80} that it does not have", "is it whole?"
                )
            if info.compress_type != zipfile.ZIP_STORED or count * DTYPES[dtype].bytes != info.file_size:
                raise CheckpointError(
                    f"{self.path}: storage {key} has {info.file_size} bytes, {count} {dtype} are told"
                )
            offset = self._start + self._data_offset(file, info)
            return Storage(str(self.path), offset, info.file_size, dtype, str(device), f"{self.path}:{offset}")

        return persistent

    def _data_offset(self, file: IO[bytes], info: zipfile.ZipInfo) -> int:
        header = os.pread(file.fileno(), 30, self._start + info.header_offset)
        name_bytes, extra_bytes = struct.unpack_from("<HH", header, 26)
        return int(info.header_offset + 30 + name_bytes + extra_bytes)


def _check_crc(path: Path, file: IO[bytes], offset: int, info: zipfile.ZipInfo) -> None:
    crc, left = 0, info.compress_size
    while left:
        data = os.pread(file.fileno(), min(left, AT_ONCE_BYTES), offset + info.compress_size - left)
        if not data:
            raise CheckpointError(f"{path} is cut off within {info.filename}", "copy it again from its source")
        crc, left = zlib.crc32(data, crc), left - len(data)
    if info.compress_type == zipfile.ZIP_STORED and crc != info.CRC:
        raise CheckpointError(
            f"{path}: {info.filename} does not match its CRC-32", "copy it again from its source; its bits have changed"
        )


class _Window:
    """A part of a file as a file of its own."""

    def __init__(self, file: IO[bytes], start: int, size_bytes: int):
        self._file, self._start, self._size_bytes, self._at = file, start, size_bytes, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max({0: 0, 1: self._at, 2: self._size_bytes}[whence] + offset, 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def read(self, count: int = -1) -> bytes:
        left = max(self._size_bytes - self._at, 0)
        data = os.pread(self._file.fileno(), left if count < 0 else min(count, left), self._start + self._at)
        self._at += len(data)
        return data

"""Read files that torch.save wrote before torch 1.6, or with `_use_new_zipfile_serialization=False`.

Such a file is five pickles (magic number, version, machine, value, keys of the storages), then each storage after its
number of elements. It has no checksums. Source: torch/serialization.py, _legacy_save and _legacy_load.
"""

import os
import struct
from itertools import pairwise
from pathlib import Path
from pickletools import genops
from typing import IO, Any, NamedTuple

from cluster.input import sandbox
from workers.checkpoint.exchange.pickles import pickle_symbols
from workers.checkpoint.exchange.pickles.tensors import Storage, item_bytes, storage_dtype
from workers.checkpoint.format.manifest_checks import open_regular
from workers.checkpoint.format.message_text import first_names, key_text
from workers.errors import CheckpointError

MAGIC, VERSION = 0x1950A86A20F9469CFC6C, 1001
MARK = MAGIC.to_bytes(10, "little")
PICKLES = 5
COUNT = struct.Struct("<q")
COPY_AGAIN = "copy it again from its source"


class _StorageInfo(NamedTuple):
    dtype: str
    device: str
    elements: int


def is_legacy(head: bytes) -> bool:
    """Detect the format from the first 16 bytes of a file."""
    return head.startswith(b"\x80") and MARK in head


class LegacyArchive:
    """A torch.save file in the old format. `value` has tensors as references into the file. Raises CheckpointError."""

    def __init__(self, path: Path):
        self.path = path
        with os.fdopen(open_regular(path), "rb") as file:
            *head, pickled, keys = self._pickles(file)
            self.pickle_bytes, size_bytes = len(pickled), os.fstat(file.fileno()).st_size
            self._check_head(*(self._read(data) for data in head))
            sandbox.raise_limits(metadata_bytes=2 * len(pickled), data_bytes=size_bytes)
            storage_infos: dict[str, _StorageInfo] = {}
            self._read(pickled, lambda pid: self._note_storage(pid, storage_infos))
            storages = self._locate_storages(file, self._read(keys), storage_infos, size_bytes)
            self.value = self._read(pickled, lambda pid: storages[pid[2]] if pid[0] == "storage" else pid[1])

    def _read(self, data: bytes, persistent: Any = None) -> Any:
        return pickle_symbols.read(data, str(self.path), persistent)

    def _pickles(self, file: IO[bytes]) -> list[bytes]:
        """Return the five pickles, and leave `file` positioned after the last one."""
        ends = [0]
        for _ in range(PICKLES):
            try:
                for _ in genops(_Bounded(file, pickle_symbols.MAX_PICKLE_BYTES)):  # type: ignore[arg-type]
                    pass
            except (ValueError, EOFError) as e:
                raise CheckpointError(f"{self.path} is damaged or cut off: {e!s:.200}", COPY_AGAIN) from None
            ends.append(file.tell())
        return [os.pread(file.fileno(), end - start, start) for start, end in pairwise(ends)]

    def _check_head(self, magic: Any, version: Any, machine: Any) -> None:
        if (magic, version) != (MAGIC, VERSION):
            raise CheckpointError(
                f"{self.path} has version {key_text(version)} of torch's old format; {VERSION} is supported",
                "load it with the torch version that wrote it, and save it again",
            )
        if not (isinstance(machine, dict) and machine.get("little_endian") is True):
            raise CheckpointError(f"{self.path} is big-endian", "save it on a little-endian machine")

    def _note_storage(self, pid: Any, storage_infos: dict[str, _StorageInfo]) -> Any:
        """Check a storage that the pickle refers to, and note it.
        For a complete module, which has its source text beside it, return the class.
        """
        if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module":
            return pid[1]
        if not _is_storage(pid) or (dtype := storage_dtype(pickle_symbols.name_of(pid[1]))) is None:
            raise CheckpointError(
                f"{self.path} has a malformed reference to a storage: {key_text(pid)[:80]}", COPY_AGAIN
            )
        key: str = pid[2]
        if pickle_symbols.name_of(pid[1]).endswith("UntypedStorage"):
            raise CheckpointError(
                f"{self.path}: storage {key[:80]} is used as a dtype that torch cannot read from its old format",
                "save it again without _use_new_zipfile_serialization=False",
            )
        if pid[5] is not None:
            raise CheckpointError(
                f"{self.path} has views of storages, as torch 0.3 wrote them", "load it with torch and save it again"
            )
        storage = _StorageInfo(dtype, pid[3], pid[4])
        if storage_infos.setdefault(key, storage) != storage:
            raise CheckpointError(f"{self.path}: storage {key[:80]} is described twice, differently", COPY_AGAIN)
        return storage

    def _locate_storages(
        self, file: IO[bytes], keys: Any, storage_infos: dict[str, _StorageInfo], size_bytes: int
    ) -> dict[str, Storage]:
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or {*keys} != {*storage_infos}:
            raise CheckpointError(
                f"{self.path} does not list the storages that its value needs:"
                f" {first_names(sorted(storage_infos)) or 'none'}",
                COPY_AGAIN,
            )
        position, storages = file.tell(), {}
        for key in keys:
            dtype, device, elements = storage_infos[key]
            count_bytes = os.pread(file.fileno(), COUNT.size, position)
            if len(count_bytes) < COUNT.size or COUNT.unpack(count_bytes) != (elements,):
                raise CheckpointError(f"{self.path}: storage {key[:80]} is cut off or has another size", COPY_AGAIN)
            position += COUNT.size
            storages[key] = Storage(
                str(self.path), position, elements * item_bytes(dtype), dtype, device, f"{self.path}:{position}"
            )
            position += storages[key].bytes
        if position != size_bytes or len(storages) != len(keys):
            raise CheckpointError(
                f"{self.path} has {size_bytes} bytes; its storages end at byte {position}", COPY_AGAIN
            )
        return storages


def _is_storage(pid: Any) -> bool:
    """Check the form ("storage", class, key, device, number of elements, view)."""
    if not (isinstance(pid, tuple) and len(pid) == 6 and pid[0] == "storage"):
        return False
    return isinstance(pid[2], str) and isinstance(pid[3], str) and type(pid[4]) is int and pid[4] >= 0


class _Bounded:
    """A file from which at most `left_bytes` are read, whatever lengths it declares."""

    def __init__(self, file: IO[bytes], left_bytes: int):
        self._file, self._left_bytes = file, left_bytes

    def read(self, count: int = -1) -> bytes:
        if not 0 <= count <= self._left_bytes:
            raise ValueError(f"a pickle of more than {pickle_symbols.MAX_PICKLE_BYTES} bytes")
        data = self._file.read(count)
        self._left_bytes -= len(data)
        return data

    def readline(self) -> bytes:
        data = self._file.readline(self._left_bytes)
        self._left_bytes -= len(data)
        return data

    def tell(self) -> int:
        return self._file.tell()

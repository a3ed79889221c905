"""Verified reading: no byte of a shard is handed out before the hash of its chunk was found right."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from workers.checkpoint.checks import open_regular, read_manifest, tensor_bytes
from workers.checkpoint.chunks import CHUNK_BYTES, chunk_count, chunk_digest
from workers.checkpoint.manifest import DamagedCheckpoint, Manifest, TensorEntry
from workers.checkpoint.words import few


class Reader:
    """One checkpoint folder, open for reading, for use in a `with`. Raises DamagedCheckpoint naming file and chunk."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        self._open = ExitStack()
        self._descriptors: dict[str, int] = {}
        self._buffer = bytearray(CHUNK_BYTES)  # reused: touching fresh pages costs more than copying
        self._held: tuple[str, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def entry(self, name: str) -> TensorEntry:
        """Of a tensor, or of the one it is tied to."""
        return self.manifest.tensors[self.manifest.resolve(name)]

    def read_into(self, name: str, out: memoryview) -> None:
        """Fill `out` with the first bytes of tensor `name`, in logical order."""
        entry = self.entry(name)
        done = 0
        while done < len(out):
            index, skip = divmod(entry.offset + done, CHUNK_BYTES)
            part = self._chunk(entry.file, index)[skip : skip + len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)

    def faults(self) -> Iterator[DamagedCheckpoint]:
        """Every fault of every file: all bytes are read."""
        for file, entry in self.manifest.files.items():
            try:
                self._descriptor(file)
            except DamagedCheckpoint as e:
                yield e
                continue
            for index in range(chunk_count(entry.bytes)):
                try:
                    self._chunk(file, index)
                except DamagedCheckpoint as e:
                    yield e

    def _chunk(self, file: str, index: int) -> memoryview:
        """The bytes of one chunk, verified, until the next one is asked for: neighbouring tensors share it."""
        entry = self.manifest.files[file]
        start = index * CHUNK_BYTES
        data = memoryview(self._buffer)[: min(CHUNK_BYTES, entry.bytes - start)]
        if self._held != (file, index):
            self._held = None
            _read_at(self._descriptor(file), start, data)
            if chunk_digest(data) != entry.xxh3_128[index]:
                raise DamagedCheckpoint(
                    f"{self.folder / file}: chunk {index + 1} of {len(entry.xxh3_128)} is not what was saved"
                    f" (bytes {start} to {start + len(data)}: {self._inside(file, start, start + len(data))})"
                )
            self._held = (file, index)
        return data

    def _descriptor(self, file: str) -> int:
        if file not in self._descriptors:
            descriptor = open_regular(self.folder / file)
            self._open.callback(os.close, descriptor)
            found_bytes, saved_bytes = os.fstat(descriptor).st_size, self.manifest.files[file].bytes
            if found_bytes != saved_bytes:
                inside = self._inside(file, found_bytes, saved_bytes)
                raise DamagedCheckpoint(
                    f"{self.folder / file} has {found_bytes} bytes, {saved_bytes} were saved ({inside})"
                )
            self._descriptors[file] = descriptor
        return self._descriptors[file]

    def _inside(self, file: str, start: int, end: int) -> str:
        """The tensors that have bytes from `start` to `end` of `file`, in words."""
        names = [
            name
            for name, tensor in self.manifest.tensors.items()
            if tensor.file == file and tensor.offset < end and tensor.offset + tensor_bytes(tensor) > start
        ]
        return few(names) or "no tensor"


def _read_at(descriptor: int, start: int, out: memoryview) -> None:
    done = 0
    while done < len(out):
        count = os.preadv(descriptor, [out[done:]], start + done)
        if count == 0:
            raise DamagedCheckpoint(f"a file ends at byte {start + done} while it is read: somebody shortens it")
        done += count

"""Files and chunk hashes that a manifest declares for a checkpoint that is being received."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.input.untrusted_files import read_bytes
from workers.checkpoint.disk.reader import Chunk
from workers.checkpoint.format.manifest import CHUNK_BYTES, MAX_MANIFEST_BYTES, FileEntry, Manifest, chunk_count
from workers.checkpoint.format.manifest_checks import parse_manifest


@dataclass(frozen=True, slots=True)
class ExpectedFiles:
    """Files of a checkpoint that is being received. `digest` is the manifest's own."""

    step: int
    digest: str
    files: dict[str, FileEntry]

    def size_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def chunks(self) -> list[Chunk]:
        """All chunks, in order."""
        return [chunk for file in self.files for chunk in self.chunks_of(file)]

    def chunks_of(self, file: str) -> list[Chunk]:
        return [(file, index) for index in range(chunk_count(self.files[file].bytes))]

    def size_of(self, chunk: Chunk) -> int:
        return min(CHUNK_BYTES, self.files[chunk[0]].bytes - chunk[1] * CHUNK_BYTES)

    def digest_of(self, chunk: Chunk) -> str:
        return self.files[chunk[0]].xxh3_128[chunk[1]]

    def name_of(self, chunk: Chunk) -> str:
        """Describe a chunk for messages, without its file."""
        return f"chunk {chunk[1] + 1} of {len(self.files[chunk[0]].xxh3_128)}"


def expected_of(manifest: Manifest) -> ExpectedFiles:
    return ExpectedFiles(manifest.step, manifest.digest, manifest.files)


def expected(path: str) -> dict[str, Any]:
    """Read and check the manifest at `path`; return step, digest and files as plain data. For a child process."""
    manifest = parse_manifest(read_bytes(Path(path), MAX_MANIFEST_BYTES), path)
    files = {name: [file.bytes, file.xxh3_128] for name, file in manifest.files.items()}
    return {"step": manifest.step, "digest": manifest.digest, "files": files}


def expected_from(data: dict[str, Any]) -> ExpectedFiles:
    """Rebuild the object from the data that `expected` returned."""
    files = {name: FileEntry(size_bytes, tuple(digests)) for name, (size_bytes, digests) in data["files"].items()}
    return ExpectedFiles(data["step"], data["digest"], files)

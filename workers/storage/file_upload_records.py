"""Records of which folders of jobs were uploaded to an object store, one file a job, outside of any job's folder."""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import quote, unquote

from cluster.paths import home, private_dir, write_private


class UploadState(StrEnum):
    DUE = "due"
    """The folder has to be uploaded: it was changed after its attempt had ended."""
    STORED = "stored"
    REMOVING = "removing"
    """What the store has of the job, up to this attempt, has to be removed."""


@dataclass(frozen=True, slots=True)
class UploadRecord:
    """State of the folder of attempt `epoch`.

    `origin` is the node whose name the folder has in the store. `nodes` have it there: those that uploaded it after
    their part of the attempt had ended, several if they share the storage, or the one that downloaded it. `missing` is
    a sentence on files that the store does not have, or "".
    """

    epoch: int
    state: UploadState
    origin: str
    nodes: tuple[str, ...] = ()
    missing: str = ""

    @property
    def is_downloaded(self) -> bool:
        return self.origin not in self.nodes

    def is_stored(self, epoch: int, node: str) -> bool:
        """Whether `node` need not upload the folder of attempt `epoch`."""
        is_current = self.epoch == epoch and self.state != UploadState.DUE
        return self.epoch > epoch or (is_current and (node in self.nodes or self.state == UploadState.REMOVING))


class UploadRecords:
    """Records for the storage at `root` and the store at `uri`. Agents that share both share them, too."""

    def __init__(self, root: Path, uri: str):
        name = hashlib.sha256(f"{root} {uri}".encode()).hexdigest()[:16]
        self._folder = private_dir(home() / "file-uploads" / name)

    def read(self, job: str) -> UploadRecord | None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            fields = json.loads(self._path(job).read_text())
            state, nodes = UploadState(fields["state"]), tuple(map(str, fields["nodes"]))
            return UploadRecord(int(fields["epoch"]), state, str(fields["origin"]), nodes, str(fields["missing"]))
        return None

    def write(self, job: str, record: UploadRecord) -> None:
        write_private(self._path(job), json.dumps(asdict(record)))

    def remove(self, job: str) -> None:
        self._path(job).unlink(missing_ok=True)

    def all(self) -> dict[str, UploadRecord]:
        names = [unquote(path.stem) for path in self._folder.glob("*.json")]
        return {job: record for job in names if (record := self.read(job)) is not None}

    def _path(self, job: str) -> Path:
        return self._folder / f"{quote(job, safe='')}.json"

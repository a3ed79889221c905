"""Files of jobs, uploads, input data and code archives."""

from typing import Literal

from typing_extensions import TypedDict


class FolderView(TypedDict):
    """Location of the files of an attempt."""

    prefix: str
    """Beginning of the paths of its files; empty unless the job ran on several nodes without a shared storage."""
    attempt: int
    node: str
    """The node through which they are read."""
    pool: str


class FileView(TypedDict):
    """An entry of a job's folder."""

    path: str
    type: Literal["file", "folder", "link", "other"]
    bytes: int
    """Size of a file, else 0."""
    modified_at: str | None
    """ISO 8601 in UTC; null if its time is not valid."""
    mode: int
    """Permission bits."""
    target: str
    """Target of a link."""
    refused: str
    """Why it cannot be transferred, or empty."""


class FilesPage(TypedDict):
    """One page of a job's files."""

    job: str
    """Id of the job."""
    running: bool
    folders: list[FolderView]
    notes: list[str]
    """Why files are missing."""
    entries: list[FileView]
    after: str
    """Request the next page with this; empty on the last page."""


class HashesView(TypedDict):
    """Hashes of some pieces of a file."""

    version: str
    """Changes when the file changes."""
    sha256: list[str]
    """SHA-256 of each piece of 8 MiB; empty at the end of the file."""


class DestinationView(TypedDict):
    """Where a file that is put is stored."""

    attempt: int
    node: str
    pool: str
    path: str
    """Path in the folder of the attempt."""
    running: bool


class PlacedView(TypedDict):
    """Files that were moved into a job's folder."""

    placed: list[str]


class UploadView(TypedDict):
    """An upload that was started or resumed."""

    there: dict[str, int]
    """Files that have been sent before, with their sizes in bytes."""


class PieceView(TypedDict):
    """A piece that was stored."""

    path: str
    offset: int
    """Offset of its first byte."""


class DiscardedView(TypedDict):
    """An upload whose files were removed."""

    upload: str


class DataView(TypedDict):
    """Input data that the server has stored."""

    sha256: str
    bytes: int
    files: int


class CodeArchiveView(TypedDict):
    """A code archive that the server has stored."""

    code_archive: str
    """SHA-256 of the archive."""

"""Send data of this machine to the server before the jobs that need it: named by its content hash, sent once."""

import hashlib
import socket
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import SpecError, UserError
from cluster.host.content_hash import content_of
from orchestrator.client.file_transfer import retry_unreachable
from orchestrator.client.file_upload import send_folder
from orchestrator.spec.checkpoint_address import is_local_path
from orchestrator.spec.job_spec import JobSpec
from orchestrator.spec.job_spec_parts import DataSpec
from orchestrator.units import size

if TYPE_CHECKING:
    from orchestrator.client.client import Client


def add_hashes(specs: Iterable[JobSpec]) -> list[JobSpec]:
    """Return the jobs with the hash of each file and folder of this machine that they read. Raises SpecError if one
    does not exist or does not match its `sha256`.
    """
    hashes: dict[str, str] = {}
    return [_add_hashes(spec, hashes) for spec in specs]


def _add_hashes(spec: JobSpec, hashes: dict[str, str]) -> JobSpec:
    if not any(is_local_path(one.uri) for one in spec.data):
        return spec
    data_specs = tuple(_with_hash(one, f"data.{index}", hashes) for index, one in enumerate(spec.data))
    return spec.model_copy(update={"data": data_specs})


def _with_hash(data: DataSpec, field: str, hashes: dict[str, str]) -> DataSpec:
    if not is_local_path(data.uri):
        return data
    path = str(Path(data.uri).expanduser().absolute())
    if path not in hashes:
        hashes[path] = _hash_path(Path(path), f"{field}.uri")
    if data.sha256 not in ("", hashes[path]):
        message = f"is {data.sha256}, but {path} has the SHA-256 {hashes[path]}"
        raise SpecError(f"{field}.sha256", message, f"correct the hash, or put the right data at {path}")
    return data.model_copy(update={"uri": path, "sha256": hashes[path]})


def _hash_path(path: Path, field: str) -> str:
    if not path.exists():
        raise SpecError(
            field, f"there is no file or folder {path}", "create it, or write POOL:PATH or the URI of an object store"
        )
    try:
        return content_of(path.resolve(), follow=True).sha256
    except UserError as e:
        raise SpecError(field, e.message, e.remedy) from None
    except OSError as e:
        raise SpecError(field, f"{path} cannot be read: {e.strerror}", "make it readable") from None


def send(client: "Client", specs: Iterable[JobSpec], print_message: Callable[[str], None]) -> None:
    """Send all data that the server does not have. An interrupted upload resumes. `print_message` gets the progress."""
    for path, sha256 in {(one.uri, one.sha256) for spec in specs for one in spec.data if is_local_path(one.uri)}:
        if not client.data.check(sha256):
            retry_unreachable(client, partial(_send, client, Path(path).resolve(), sha256, print_message))


def _send(client: "Client", path: Path, sha256: str, print_message: Callable[[str], None]) -> None:
    def progress(done: int, total: int) -> None:
        print_message(f"sending {path}: {size(done)} of {size(total)}")

    upload = hashlib.sha256(f"{socket.gethostname()}\n{sha256}".encode()).hexdigest()[:24]
    send_folder(client, "", upload, path, progress)
    client.data.store(sha256, upload, single=path.name if path.is_file() else "")

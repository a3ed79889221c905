"""Data of this machine on its way to the server, before the jobs that want it: named by its content, sent once."""

import hashlib
import socket
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.content_hash import content_of
from cluster.errors import SpecError, UserError
from orchestrator.checkpoint_address import of_this_machine
from orchestrator.file_transfer import until_reached
from orchestrator.file_upload import send_folder
from orchestrator.job_spec import JobSpec
from orchestrator.job_spec_parts import DataSpec
from orchestrator.show.units import size

if TYPE_CHECKING:
    from orchestrator.client import Client


def named(specs: Iterable[JobSpec]) -> list[JobSpec]:
    """The same jobs with the hash of each file and folder of this machine that they read. Raises SpecError for one that
    is not there, or is something else than its `sha256` says.
    """
    known: dict[str, str] = {}
    return [_named(spec, known) for spec in specs]


def _named(spec: JobSpec, known: dict[str, str]) -> JobSpec:
    if not any(of_this_machine(one.uri) for one in spec.data):
        return spec
    told = tuple(_with_hash(one, f"data.{index}", known) for index, one in enumerate(spec.data))
    return spec.model_copy(update={"data": told})


def _with_hash(data: DataSpec, field: str, known: dict[str, str]) -> DataSpec:
    if not of_this_machine(data.uri):
        return data
    path = str(Path(data.uri).expanduser().absolute())
    if path not in known:
        known[path] = _hashed(Path(path), f"{field}.uri")
    if data.sha256 not in ("", known[path]):
        told = f"is {data.sha256}, and {path} has the SHA-256 {known[path]}"
        raise SpecError(f"{field}.sha256", told, "correct the hash, or put the right data there")
    return data.model_copy(update={"uri": path, "sha256": known[path]})


def _hashed(path: Path, field: str) -> str:
    if not path.exists():
        raise SpecError(field, f"there is no file or folder {path}", "create it, or write POOL:PATH or a store's URI")
    try:
        return content_of(path.resolve(), follow=True).sha256
    except UserError as e:
        raise SpecError(field, e.message, e.remedy) from None
    except OSError as e:
        raise SpecError(field, f"{path} cannot be read: {e.strerror}", "make it readable") from None


def send(client: "Client", specs: Iterable[JobSpec], tell: Callable[[str], None]) -> None:
    """All that the server has not got. What arrived of one that was cut off does not travel again. `tell` is told now
    and then what is done.
    """
    for path, sha256 in {(one.uri, one.sha256) for spec in specs for one in spec.data if of_this_machine(one.uri)}:
        if not client.data_has(sha256):
            until_reached(client, partial(_send, client, Path(path).resolve(), sha256, tell))


def _send(client: "Client", path: Path, sha256: str, tell: Callable[[str], None]) -> None:
    def progress(done: int, total: int) -> None:
        tell(f"sending {path}: {size(done)} of {size(total)}")

    upload = hashlib.sha256(f"{socket.gethostname()}\n{sha256}".encode()).hexdigest()[:24]
    send_folder(client, "", upload, path, progress)
    client.data_keep(sha256, upload, path.name if path.is_file() else "")

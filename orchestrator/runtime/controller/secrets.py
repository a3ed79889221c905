"""Resolve a job's secrets. The server reads them at each launch and stores none."""

import os
from collections.abc import Mapping
from pathlib import Path

from cluster.errors import SpecError
from cluster.input.untrusted_files import UnreadableFile, read_bytes

MAX_SECRET_BYTES = 64 << 10
MAX_TOTAL_BYTES = 1 << 20
"""Limit for all secrets of a job: they become environment variables, whose size the system limits."""


def resolve_secrets(references: Mapping[str, str]) -> dict[str, str]:
    """Return values by name, from references `env:NAME` (the server's environment) or `file:/path`.

    Raises SpecError with the name of a secret that is missing, empty, too long or not text.
    """
    values = {name: _secret(f"secrets.{name}", reference) for name, reference in references.items()}
    if sum(len(value.encode()) for value in values.values()) > MAX_TOTAL_BYTES:
        raise SpecError("secrets", f"are longer than {MAX_TOTAL_BYTES} bytes together", "send large data as files")
    return values


def _secret(field: str, reference: str) -> str:
    scheme, _, location = reference.partition(":")
    value = _from_environment(field, location) if scheme == "env" else _from_file(field, location)
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise SpecError(
            field, f"{location} cannot be read: it is not UTF-8 text", "encode it, for example as base64"
        ) from None
    if not value or "\0" in value:
        problem = "contains a NUL byte, which a variable cannot" if value else "is empty"
        raise SpecError(field, f"{location} {problem}", "write the secret there as text")
    if size > MAX_SECRET_BYTES:
        raise SpecError(field, f"{location} is longer than {MAX_SECRET_BYTES} bytes", "send large data as files")
    return value


def _from_environment(field: str, name: str) -> str:
    if name not in os.environ:
        remedy = "run `polyfleet server stop`, set the variable, then run this command again: the next server reads it"
        raise SpecError(field, f"{name} is not set in the server's environment", remedy)
    return os.environ[name]


def _from_file(field: str, path: str) -> str:
    """Read a secret from a file. Links are followed, because Kubernetes mounts secrets as links."""
    try:
        return read_bytes(Path(path).resolve(), MAX_SECRET_BYTES).decode().strip()
    except (OSError, RuntimeError, ValueError, UnreadableFile) as e:
        reason = e.reason.removeprefix("cannot be opened: ") if isinstance(e, UnreadableFile) else _reason(e)
        raise SpecError(field, f"{path} cannot be read: {reason}", "check the path and its mode") from None


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    return (error.strerror if isinstance(error, OSError) else None) or "it is not the path of a file"

"""Secrets of a job: the server looks them up at each launch, and keeps none."""

import os
from collections.abc import Mapping
from pathlib import Path

from cluster.errors import SpecError
from cluster.untrusted_files import UnreadableFile, read_bytes

LONGEST_SECRET_BYTES = 64 << 10
MOST_SECRET_BYTES = 1 << 20
"""Of all secrets of a job: they become variables of a process, which the system limits."""


def resolve_secrets(references: Mapping[str, str]) -> dict[str, str]:
    """NAME -> value from `env:NAME` (the server's environment) or `file:/path`. Raises SpecError naming the one that is
    absent, empty, too long or no text.
    """
    values = {name: _secret(f"secrets.{name}", reference) for name, reference in references.items()}
    if sum(len(value.encode()) for value in values.values()) > MOST_SECRET_BYTES:
        raise SpecError("secrets", f"are longer than {MOST_SECRET_BYTES} bytes together", "send large data as files")
    return values


def _secret(field: str, reference: str) -> str:
    scheme, _, where = reference.partition(":")
    value = _of_environment(field, where) if scheme == "env" else _of_file(field, where)
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise SpecError(field, f"{where} cannot be read: it is not UTF-8 text", "encode it, as base64 say") from None
    if not value or "\0" in value:
        what = "holds a NUL byte, which no variable can" if value else "is empty"
        raise SpecError(field, f"{where} {what}", "write the secret there as text")
    if size > LONGEST_SECRET_BYTES:
        raise SpecError(field, f"{where} is longer than {LONGEST_SECRET_BYTES} bytes", "send large data as files")
    return value


def _of_environment(field: str, name: str) -> str:
    if name not in os.environ:
        remedy = "run `polyfleet server stop`, set the variable, then run this command again: the next server reads it"
        raise SpecError(field, f"{name} is not set in the server's environment", remedy)
    return os.environ[name]


def _of_file(field: str, where: str) -> str:
    """Links are followed: secrets that Kubernetes mounts are links."""
    try:
        return read_bytes(Path(where).resolve(), LONGEST_SECRET_BYTES).decode().strip()
    except (OSError, RuntimeError, ValueError, UnreadableFile) as e:
        said = e.why.removeprefix("cannot be opened: ") if isinstance(e, UnreadableFile) else _said(e)
        raise SpecError(field, f"{where} cannot be read: {said}", "check the path and its mode") from None


def _said(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    return (error.strerror if isinstance(error, OSError) else None) or "it is no path of a file"

"""A Record as JSON and back: what a row of the table `jobs` holds, beside the columns it is looked up by."""

import hashlib
import zlib
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from orchestrator.core.fold import Record
from orchestrator.store.codec import decode as json_of
from orchestrator.store.codec import encode as text_of
from orchestrator.store.damaged_rows import DamagedDataError

FOLD = 2
"""Raised when the same events fold to another Record although its fields are the same."""


def encode_record(record: Record) -> str:
    try:
        return str(_adapter().dump_json(record).decode())
    except ValueError:  # text that is not Unicode, such as half of a surrogate pair
        return text_of(_adapter().dump_python(record, mode="python"))


def decode_record(text: Any, digest: int) -> Record:
    """Raises DamagedDataError for what `encode` did not write."""
    if not isinstance(text, str) or checksum(text) != digest:
        raise DamagedDataError("has data that does not match its checksum")
    try:
        return _parsed(text)
    except (ValueError, RecursionError) as e:
        raise DamagedDataError(f"has data that is not a record: {e}") from None


def checksum(text: str) -> int:
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


@cache
def version() -> str:
    """Of all that a Record is made of: a row written with other fields or defaults is folded again from its events."""
    return hashlib.sha256(repr((FOLD, sorted(_shape(Record).items()))).encode()).hexdigest()[:16]


def _parsed(text: str) -> Record:
    try:
        record: Record = _adapter().validate_json(text)
    except ValueError:
        record = _adapter().validate_python(json_of(text))
    return record


@cache
def _adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(Record)


def _shape(kind: Any) -> dict[str, list[str]]:
    """Class -> its fields with type and default, of `kind` and all dataclasses it holds."""
    found: dict[str, list[str]] = {}
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        defaults = {f.name: repr(_default(f)) for f in fields(kind)}
        found[str(kind)] = [f"{name}: {hints[name]} = {default}" for name, default in defaults.items()]
        for inner in hints.values():
            found |= _shape(inner)
    for inner in get_args(kind):
        found |= _shape(inner)
    return found


def _default(field: Any) -> Any:
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else None

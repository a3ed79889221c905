"""Encode a Record as JSON, and decode it: the column `data` of the table `jobs`.

Fields with their default values are left out: they are most of a record, and a change of a default changes `version`.
"""

import hashlib
import zlib
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from orchestrator.core.jobs.fold import Record
from orchestrator.store.rows.codec import decode as json_of
from orchestrator.store.rows.codec import encode as text_of
from orchestrator.store.rows.damaged_rows import DamagedDataError

RECORD_VERSION = 3
"""Increased whenever the same events lead to another Record although its fields are unchanged."""


def encode_record(record: Record) -> str:
    try:
        return str(_adapter().dump_json(record, exclude_defaults=True).decode())
    except ValueError:  # text that is not Unicode, such as half of a surrogate pair
        return text_of(_adapter().dump_python(record, mode="python", exclude_defaults=True))


def decode_record(text: Any, digest: int) -> Record:
    """Decode a Record. Raises DamagedDataError for text that `encode_record` did not write."""
    if not isinstance(text, str) or checksum(text) != digest:
        raise DamagedDataError("has data that does not match its checksum")
    try:
        return _parse_record(text)
    except (ValueError, RecursionError) as e:
        raise DamagedDataError(f"has data that is not a record: {e}") from None


def checksum(text: str) -> int:
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


@cache
def version() -> str:
    """Version of the Record's fields and defaults: a row with another version is rebuilt from its events."""
    return hashlib.sha256(repr((RECORD_VERSION, sorted(_shape(Record).items()))).encode()).hexdigest()[:16]


def _parse_record(text: str) -> Record:
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
    """Class -> its fields with type and default, for `kind` and all dataclasses in it."""
    shapes: dict[str, list[str]] = {}
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        defaults = {f.name: repr(_default(f)) for f in fields(kind)}
        shapes[str(kind)] = [f"{name}: {hints[name]} = {default}" for name, default in defaults.items()]
        for inner in hints.values():
            shapes |= _shape(inner)
    for inner in get_args(kind):
        shapes |= _shape(inner)
    return shapes


def _default(field: Any) -> Any:
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else None

"""Frozen dataclasses to JSON-like data and back. Only plain data crosses Ray, HTTP and disk."""

from dataclasses import asdict
from functools import cache
from typing import Any, TypeVar, cast

from cluster.errors import UserError

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Dicts, lists, strings, numbers: what `json.dumps` takes. `value` is a dataclass instance."""
    return asdict(value)


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter  # 60 ms: only those who read messages pay for it

    return TypeAdapter(kind)


def from_plain(kind: type[T], data: Any) -> T:
    """`data` as an instance of the dataclass `kind`, checked. Raises UserError naming the first wrong field."""
    from pydantic import ValidationError

    try:
        checked: T = _adapter(cast(Any, kind)).validate_python(data)
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"{kind.__name__}.{where}: {first['msg']}", "are both ends of the same Polyfleet version?"
        ) from None
    return checked

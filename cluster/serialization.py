"""Frozen dataclasses to JSON-like data and back. Only plain data crosses Ray, HTTP and disk."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar, cast

from cluster.errors import UserError

T = TypeVar("T")
LEAVES = frozenset({str, int, float, bool, type(None)})


def to_plain(value: Any) -> Any:
    """Dicts, lists, strings, numbers: what `json.dumps` takes. `value` is a dataclass instance.

    As `dataclasses.asdict`, which takes five times as long: it copies every leaf.
    """
    kind: Any = type(value)
    if kind in LEAVES:
        return value
    if found := _fields(kind):
        names, values = found
        pairs = zip(names, values(value), strict=True)
        return {name: item if type(item) in LEAVES else to_plain(item) for name, item in pairs}
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return kind([to_plain(item) for item in value])
    return value


def to_json(value: Any) -> dict[str, Any]:
    """As `to_plain`, by pydantic: a large dataclass takes a third of the time, the first one 60 ms."""
    kind: Any = type(value)
    plain: dict[str, Any] = _adapter(kind).dump_python(value, warnings=False)
    return plain


@cache
def _fields(kind: Any) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]] | None:
    """The names of a dataclass' fields, and what gives their values; None for another class."""
    if not is_dataclass(kind):
        return None
    names = tuple(f.name for f in fields(kind))
    return names, attrgetter(*names) if names[1:] else lambda value: tuple(getattr(value, name) for name in names)


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
            f"{kind.__name__}.{where}: {first['msg']}", "install the same Polyfleet version on the server and its nodes"
        ) from None
    return checked

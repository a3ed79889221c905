"""Find the scalars of a YAML file that are text: their field is text in the file's pydantic model.

Such a field gets the characters as written: `3.10`, `02134`, `12e4`, `0x1F`, `1_000` and `true` are then neither
numbers nor booleans. A field of type Any gets the value that YAML gives the scalar.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

Types = tuple[Any, ...]
"""The members of a union, or the one type; empty if the type is unknown."""

LISTS: Types = (list, tuple, set, frozenset)
MAPPINGS: Types = (dict, Mapping)
PARSED: Types = (int, float, bool, Any)


@dataclass(frozen=True, slots=True)
class WrittenAs:
    """Marks the type that a field has in the file: `Annotated[Any, WrittenAs(str | list[str])]`."""

    type: Any


def types_of(annotation: Any, metadata: tuple[Any, ...] = ()) -> Types:
    """Return the types of an annotation: `Annotated` is removed and a union split into its members."""
    written_type = next((note.type for note in metadata if isinstance(note, WrittenAs)), None)
    if written_type is not None:
        return types_of(written_type)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return types_of(arguments[0], arguments[1:])
    if origin in (Union, UnionType):
        return tuple(member_type for member in arguments for member_type in types_of(member))
    if origin is Literal:
        return tuple(type(value) for value in arguments)
    return (annotation,)


def types_at(types: Types, key: str) -> Types:
    """Return the types of the value at `key` in a mapping of one of these types."""
    return tuple(value_type for type_ in types for value_type in _types_at_key(type_, key))


def _types_at_key(type_: Any, key: str) -> Types:
    if isinstance(type_, type) and issubclass(type_, BaseModel):
        field = type_.model_fields.get(key)
        return types_of(field.annotation, tuple(field.metadata)) if field else ()
    return types_of(get_args(type_)[1]) if get_origin(type_) in MAPPINGS else ()


def types_in(types: Types) -> Types:
    """Return the types of the items of a list of one of these types.

    All items of a tuple have its first type.
    """
    return tuple(
        item_type for type_ in types if get_origin(type_) in LISTS for item_type in types_of(get_args(type_)[0])
    )


def is_text(types: Types) -> bool:
    """Return whether a scalar of these types is always text. If it may also be a number, its form decides."""
    return str in types and not any(type_ in PARSED for type_ in types)

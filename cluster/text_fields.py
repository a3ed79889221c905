"""Which scalars of a YAML file are text: those whose field is text in the pydantic model that the file is for.

Such a field takes the characters that stand in the file: `3.10`, `02134`, `12e4`, `0x1F`, `1_000` and `true` are then
neither numbers nor booleans. A field of type Any takes what the scalar means.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

Types = tuple[Any, ...]
"""The members of a union, one for any other type; empty where nothing is known."""

LISTS: Types = (list, tuple, set, frozenset)
MAPPINGS: Types = (dict, Mapping)
PARSED: Types = (int, float, bool, Any)


@dataclass(frozen=True, slots=True)
class WrittenAs:
    """`Annotated[Any, WrittenAs(str | list[str])]`: what a file has for a field whose own type says less."""

    type: Any


def types_of(annotation: Any, metadata: tuple[Any, ...] = ()) -> Types:
    """Without `Annotated`, and with each member of a union by itself."""
    written = next((note.type for note in metadata if isinstance(note, WrittenAs)), None)
    if written is not None:
        return types_of(written)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return types_of(arguments[0], arguments[1:])
    if origin in (Union, UnionType):
        return tuple(one for member in arguments for one in types_of(member))
    if origin is Literal:
        return tuple(type(value) for value in arguments)
    return (annotation,)


def types_at(types: Types, key: str) -> Types:
    """Of the value below `key`, in a mapping of one of these types."""
    return tuple(one for it in types for one in _at(it, key))


def _at(it: Any, key: str) -> Types:
    if isinstance(it, type) and issubclass(it, BaseModel):
        field = it.model_fields.get(key)
        return types_of(field.annotation, tuple(field.metadata)) if field else ()
    return types_of(get_args(it)[1]) if get_origin(it) in MAPPINGS else ()


def types_in(types: Types) -> Types:
    """Of the items of a list of one of these types. A tuple is taken for one of equal items."""
    return tuple(one for it in types if get_origin(it) in LISTS for one in types_of(get_args(it)[0]))


def is_text(types: Types) -> bool:
    """Whether a scalar there is text, whatever it looks like; where it may be a number as well, its look decides."""
    return str in types and not any(it in PARSED for it in types)

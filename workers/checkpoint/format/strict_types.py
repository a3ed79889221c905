"""Convert JSON data to the dataclasses of a manifest, strictly: an integer is not "16", true or 1.9.

pydantic's lax mode turns each of those into a number, and its strict mode reads JSON nested at most 200 times, which is
less than the format allows. This is also five times as fast, and does not need pydantic.
"""

import types
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
Parser = Callable[[Any, str], Any]
"""Convert JSON data at a path such as `files.x.bytes`. Raises WrongType."""


class WrongType(ValueError):
    """A value has the wrong type; the message begins with its path."""


def parse_dataclass(kind: type[T], data: Any) -> T:
    """Convert `data` to the dataclass `kind`. Unknown keys are ignored. Raises WrongType."""
    instance: T = _dataclass_parser(cast(Any, kind))(data, kind.__name__)
    return instance


def _parser(hint: Any) -> Parser:
    if hint is Any:
        return lambda data, path: data
    if hint in (int, str):
        return _scalar_parser(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is types.UnionType:  # only `X | None` occurs
        return _optional_parser(_parser(arguments[0]))
    if origin is tuple:
        return _scalar_list_parser(arguments[0]) if arguments[0] in (int, str) else _list_parser(_parser(arguments[0]))
    if origin is dict:
        return _dict_parser(_parser(arguments[1]))
    return _dataclass_parser(hint)


def _scalar_parser(kind: type) -> Parser:
    def take(data: Any, path: str) -> Any:
        if type(data) is not kind:
            raise _wrong_type(data, path, _TYPE_NAMES[kind])
        return data

    return take


def _optional_parser(take: Parser) -> Parser:
    return lambda data, path: None if data is None else take(data, path)


def _scalar_list_parser(kind: type) -> Parser:
    only = frozenset((kind,))

    def take(data: Any, path: str) -> Any:
        if type(data) is not list or not only.issuperset(map(type, data)):
            raise _wrong_type(data, path, f"a list, each item {_TYPE_NAMES[kind]}")
        return tuple(data)

    return take


def _list_parser(inner: Parser) -> Parser:
    def take(data: Any, path: str) -> Any:
        if type(data) is not list:
            raise _wrong_type(data, path, "a list")
        return tuple([inner(item, path) for item in data])

    return take


def _dict_parser(inner: Parser) -> Parser:
    def take(data: Any, path: str) -> Any:
        if type(data) is not dict:
            raise _wrong_type(data, path, "an object")
        return {key: inner(item, f"{path}.{key}") for key, item in data.items()}

    return take


@cache
def _dataclass_parser(kind: Any) -> Parser:
    hints = get_type_hints(kind)
    parsers = {field.name: _parser(hints[field.name]) for field in fields(kind)}
    required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}

    def take(data: Any, path: str) -> Any:
        if type(data) is not dict:
            raise _wrong_type(data, path, "an object")
        if not required <= data.keys():
            raise WrongType(f"{path} has no {min(required - data.keys())!r}")
        return kind(**{key: parsers[key](value, f"{path}.{key}") for key, value in data.items() if key in parsers})

    return take


_TYPE_NAMES = {int: "an integer", str: "text"}


def _wrong_type(data: Any, path: str, expected: str) -> WrongType:
    text = f"{data!r:.60}" if type(data) in (int, float, str, bool) else type(data).__name__
    return WrongType(f"{path:.200} is {text}, expected {expected}")

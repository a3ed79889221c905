"""Turn pydantic's errors into one message: the field, what is wrong, and the nearest valid key."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from cluster.errors import SpecError, UserError, nearest

M = TypeVar("M", bound=BaseModel)
R = TypeVar("R")

MAX_VALUE_LENGTH = 60
# Replacements in pydantic's messages: "must" instead of "should", and YAML's words for types.
WORDING = (
    (re.compile(r"^(Value error|Assertion failed), "), ""),
    (re.compile(r"^(Input|String|List|Tuple|Set|Dictionary|Value|Number) should "), "must "),
    (re.compile(r" after validation, not \d+"), ""),
    (re.compile(r"valid (tuple|set|array)"), "list"),
    (re.compile(r"valid dictionary"), "mapping"),
)


class WrongValueError(ValueError):
    """A validator's error with a remedy. `validate_model` keeps the remedy and adds the field.

    A validator of a model names the wrong one of its fields in `field`.
    """

    def __init__(self, message: str, remedy: str = "", field: str = ""):
        super().__init__(message, remedy, field)
        self.message = message
        self.remedy = remedy
        self.field = field

    def __str__(self) -> str:
        return self.message


def prefix_field(function: Callable[..., R], *arguments: Any) -> R:
    """Call `function` inside a validator: its UserError becomes an error of the field that is validated."""
    try:
        return function(*arguments)
    except UserError as e:
        raise WrongValueError(e.message, e.remedy) from None


def validate_model(model_class: type[M], data: Any, source: str = "") -> M:
    """Return `data` as an instance of `model_class`. `source` names the file it came from.

    Raises SpecError with the dotted field as the user wrote it (without pydantic's names for unions), the value, and
    for an unknown key the nearest valid one.
    """
    try:
        return model_class.model_validate(data)
    except ValidationError as e:
        errors = _keep_likely_members([_locate(dict(error), data) for error in e.errors(include_url=False)])
    # Unknown keys come first and hide missing ones: a misspelt key is both.
    chosen = min(errors, key=lambda error: error.type != "extra_forbidden")
    hidden = "missing" if chosen.type == "extra_forbidden" else ""
    other_count = len({error.path for error in errors if error.type != hidden} - {chosen.path})
    more = f" (and {other_count} more)" if other_count else ""
    in_source = f" (in {source})" if source else ""
    message, remedy = _sentence(chosen, model_class)
    raise SpecError(chosen.field, f"{message}{in_source}{more}", remedy)


@dataclass(frozen=True, slots=True)
class _Error:
    """One error of pydantic.

    `steps` is its `loc`; each part is marked as a key of the data (True), or pydantic's name of a union's member.
    """

    type: str
    message: str
    context: dict[str, Any]
    value: Any
    steps: tuple[tuple[str | int, bool], ...]

    @property
    def path(self) -> tuple[str | int, ...]:
        return tuple(part for part, written in self.steps if written)

    @property
    def cause(self) -> WrongValueError | None:
        error = self.context.get("error")
        return error if isinstance(error, WrongValueError) else None

    @property
    def field(self) -> str:
        own = (self.cause.field,) if self.cause and self.cause.field else ()
        return ".".join(str(part) for part in (*self.path, *own))

    @property
    def member(self) -> tuple[tuple[str | int, ...], str | int] | None:
        """The outermost union that the error comes from, and the member of it."""
        for position, (part, written) in enumerate(self.steps):
            if not written:
                return tuple(p for p, _ in self.steps[:position]), part
        return None


def _locate(error: dict[str, Any], data: Any) -> _Error:
    steps = []
    current, last = data, len(error["loc"]) - 1
    for position, part in enumerate(error["loc"]):
        written = _has(current, part)
        current = current[part] if written else current
        steps.append((part, written or (position == last and error["type"] == "missing")))
    return _Error(error["type"], error["msg"], error.get("ctx") or {}, error["input"], tuple(steps))


def _keep_likely_members(errors: list[_Error]) -> list[_Error]:
    """Keep, for each union, the errors of the member that the user probably meant.

    If a value matches no member of a union, pydantic lists the errors of all. The member that parsed furthest into
    the value is chosen, then the one with the fewest errors.
    """
    unions: dict[Any, dict[Any, list[_Error]]] = {}
    for error in errors:
        union, member = error.member or (None, None)
        unions.setdefault(union, {}).setdefault(member, []).append(error)
    chosen = [
        min(members.values(), key=lambda group: (-max(len(e.path) for e in group), len(group)))
        for members in unions.values()
    ]
    return [error for group in chosen for error in group]


def _has(container: Any, part: str | int) -> bool:
    if isinstance(container, dict):
        return part in container
    return isinstance(container, list | tuple) and isinstance(part, int) and part < len(container)


def _sentence(error: _Error, model_class: type[BaseModel]) -> tuple[str, str]:
    """Return the message and the remedy of an error."""
    if error.cause:
        return error.cause.message, error.cause.remedy
    match error.type:
        case "extra_forbidden":
            key = str(error.path[-1])
            return f"unknown key {key!r}", nearest(key, _valid_keys(model_class, error.path[:-1]))
        case "missing":
            return "is required", ""
        case "model_type" | "dict_type" | "model_attributes_type":
            return f"must be a mapping, got {_short_text(error.value)}", ""
        case "literal_error" | "enum" if isinstance(error.value, str):
            valid = re.findall(r"'([^']*)'", str(error.context.get("expected", "")))
            return f"unknown value {_short_text(error.value)}", nearest(error.value, valid)
        case "bool_type" | "bool_parsing":
            return f"must be true or false, got {_short_text(error.value)}", ""
        case "value_error" | "assertion_error":
            return _reword(error.message), ""
    return f"{_reword(error.message)}, got {_short_text(error.value)}", ""


def _reword(message: str) -> str:
    for pattern, replacement in WORDING:
        message = pattern.sub(replacement, message)
    return f"{message[:1].lower()}{message[1:]}"


def _short_text(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}…"


def _valid_keys(model_class: type[BaseModel], path: Iterable[str | int]) -> list[str]:
    """Return the keys of the models at `path`, in order; for a union those of all members."""
    kinds: list[Any] = [model_class]
    for part in path:
        kinds = [inner for kind in kinds for inner in _inside(kind, part)]
    models = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return list(dict.fromkeys(field.alias or name for model in models for name, field in model.model_fields.items()))


def _inside(kind: Any, part: str | int) -> Iterator[Any]:
    """Yield the types that a value of type `kind` may have at key or index `part`."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            if part in (name, field.alias):
                yield from _members(field.annotation)
        return
    arguments = [a for a in get_args(kind) if a is not Ellipsis]
    if arguments:  # dict[key, value], list[item], tuple[item, ...]
        yield from _members(arguments[-1])


def _members(kind: Any) -> Iterator[Any]:
    """Yield the types inside Annotated, unions and optionals."""
    if get_origin(kind) is Annotated:
        yield from _members(get_args(kind)[0])
    elif get_origin(kind) in (Union, UnionType):
        for member in get_args(kind):
            yield from _members(member)
    else:
        yield kind

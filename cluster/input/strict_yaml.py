"""Read a small, unambiguous subset of YAML, and write YAML. Tags never construct objects.

Values are built from the parser's events. Plain scalars follow YAML 1.2's core schema: only `true` and `false` are
booleans; `no`, `1:30` and dates stay text. If the file's model has a text field, its scalar is used as written.
"""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import yaml

from cluster.errors import SpecError
from cluster.input.text_fields import Types, is_text, types_at, types_in

T = TypeVar("T")
MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_NODES = 20_000

NULL = re.compile(r"~|null|Null|NULL|")
TRUE = re.compile(r"true|True|TRUE")
FALSE = re.compile(r"false|False|FALSE")
INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
MAX_DIGITS = 40
NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")

# The C parser, if PyYAML was built with it: ten times as fast, and it reads only as far as events are requested.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load(text: str, source: str, model: type | None = None) -> dict[str, Any]:
    """Parse `text`, a mapping. Scalars are text if the fields of `model` (a pydantic model) are.

    Raises SpecError with `source` and line for YAML outside the subset: over 1 MiB, deeper than 32, more than 20,000
    nodes, anchors, aliases, tags, a duplicate key, NaN or Infinity, a second document, or anything but a mapping at the
    top.
    """
    return _read(text, source, _Builder(text, source, model).document)


def _read(text: str, source: str, build: Callable[[], T]) -> T:
    """Return the result of `build`; the parser's errors become SpecError."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise SpecError("", f"{source} is larger than {MAX_BYTES >> 20} MiB")
    try:
        return build()
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        line = mark.line + 1 if mark else 1
        tab = "\t" in _line(text, line)
        remedy = "indent with spaces: YAML does not allow tabs there" if tab else ""
        raise SpecError("", f"{source}:{line}: not YAML: {e.problem or e.context}", remedy) from None
    except yaml.reader.ReaderError as e:
        line = text.count("\n", 0, e.position) + 1
        raise SpecError("", f"{source}:{line}: not YAML: {e.reason}", "save the file as UTF-8 text") from None
    except UnicodeEncodeError as e:
        line = text.count("\n", 0, e.start) + 1
        raise SpecError("", f"{source}:{line}: contains half a surrogate pair", "save the file as UTF-8 text") from None


def load_all(text: str, source: str, model: type | None = None) -> list[dict[str, Any]]:
    """Parse the documents of `text`, which `---` separates.

    Raises like `load`; the limits apply to all of `text`.
    """
    return _read(text, source, lambda: list(_Builder(text, source, model).documents()))


def dump(data: Any) -> str:
    """Write dicts, lists, tuples, strings and numbers as YAML that `load` and YAML 1.1 readers read alike."""
    text: str = yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=120
    )
    return text


def scalar(text: str) -> Any:
    """Return the value of a plain (unquoted) scalar.

    Raises ValueError for NaN, Infinity and numbers too large.
    """
    if NULL.fullmatch(text):
        return None
    if TRUE.fullmatch(text):
        return True
    if FALSE.fullmatch(text):
        return False
    if INTEGER.fullmatch(text):
        if len(text) > MAX_DIGITS:
            raise ValueError(f"{text[:MAX_DIGITS]}… is too long for a number")
        return int(text, 0 if text[1:2] in ("o", "x") else 10)
    if FLOAT.fullmatch(text):
        number = float(text)
        if math.isfinite(number):
            return number
        raise ValueError(f"{text[:MAX_DIGITS]} is too large for a number")
    if NOT_FINITE.fullmatch(text):
        raise ValueError(f"{text} is not a finite number")
    return text


class _Builder:
    """Builds documents from parser events.

    It counts nodes as it reads, so that a YAML bomb is never expanded.
    """

    def __init__(self, text: str, source: str, model: type | None):
        self.source = source
        self.types: Types = (model,) if model else ()
        self.events: Iterator[Any] = yaml.parse(text, Loader=_Loader)
        self.nodes = 0

    def document(self) -> dict[str, Any]:
        next(self.events)  # the stream starts
        if isinstance(next(self.events), yaml.StreamEndEvent):
            raise self.empty()
        top = self.top()
        after = next(self.events)
        if not isinstance(after, yaml.StreamEndEvent):
            raise self.error(after, "a second document", "keep one document in a file")
        return top

    def documents(self) -> Iterator[dict[str, Any]]:
        next(self.events)  # the stream starts
        count = 0
        while not isinstance(next(self.events), yaml.StreamEndEvent):
            count += 1
            yield self.top()
        if not count:
            raise self.empty()

    def top(self) -> dict[str, Any]:
        """Build one document, whose start event was read already."""
        first = next(self.events)
        top = self.node(first, 1, self.types)
        if not isinstance(top, dict):
            raise self.error(first, "the top level must be a mapping, `key: value`")
        next(self.events)  # the document ends
        return top

    def empty(self) -> SpecError:
        return SpecError("", f"{self.source} is empty", "it must be a mapping, `key: value`")

    def node(self, event: Any, depth: int, types: Types) -> Any:
        """Build the value that begins with `event`. `types` are the model's types for it."""
        self.check(event, depth)
        if isinstance(event, yaml.ScalarEvent):
            return self.scalar(event, types)
        if isinstance(event, yaml.SequenceStartEvent):
            return self.sequence(depth, types)
        return self.mapping(depth, types)

    def check(self, event: Any, depth: int) -> None:
        self.nodes += 1
        if isinstance(event, yaml.AliasEvent):
            raise self.error(
                event, f"alias *{event.anchor}", "write the value out: anchors and aliases are not supported"
            )
        if event.anchor is not None:
            raise self.error(
                event, f"anchor &{event.anchor}", "write the values out: anchors and aliases are not supported"
            )
        if event.tag is not None:
            raise self.error(event, f"tag {event.tag}", "write the plain value: tags are not supported")
        if depth > MAX_DEPTH:
            raise self.error(event, f"nested deeper than {MAX_DEPTH} levels")
        if self.nodes > MAX_NODES:
            raise self.error(event, f"more than {MAX_NODES} values")

    def scalar(self, event: Any, types: Types) -> Any:
        if not event.implicit[0]:  # quoted or a block: text as written
            return event.value
        if is_text(types) and not NULL.fullmatch(event.value):  # a field without a value is not an empty text
            return event.value
        try:
            return scalar(event.value)
        except ValueError as e:
            raise self.error(event, str(e), "put it in quotes if it is text") from None

    def sequence(self, depth: int, types: Types) -> list[Any]:
        items = []
        item_types = types_in(types)
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self.node(event, depth + 1, item_types))
        return items

    def mapping(self, depth: int, types: Types) -> dict[str, Any]:
        items: dict[str, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            self.check(event, depth + 1)
            if not isinstance(event, yaml.ScalarEvent):
                raise self.error(event, "a key must be text, not a list or a mapping")
            if event.value in items:
                raise self.error(event, f"key {event.value!r} appears twice", "keep one of them")
            items[event.value] = self.node(next(self.events), depth + 1, types_at(types, event.value))
        return items

    def error(self, event: Any, message: str, remedy: str = "") -> SpecError:
        return SpecError("", f"{self.source}:{event.start_mark.line + 1}: {message}", remedy)


class _Dumper(yaml.SafeDumper):
    """Quotes text that our reader or a YAML 1.1 reader would not read as text; writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else "'" if _is_not_text(value) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(value), style=style)


def _is_not_text(value: str) -> bool:
    try:
        return not isinstance(scalar(value), str)
    except ValueError:
        return True


def _line(text: str, number: int) -> str:
    lines = text.splitlines()
    return lines[number - 1] if number <= len(lines) else ""


_Dumper.add_representer(str, _text)
_Dumper.add_multi_representer(str, _text)

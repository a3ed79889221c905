"""Write YAML with comments.

The dumper of cluster.input.strict_yaml writes every key and value, so that text from users cannot change the structure.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from cluster.input import strict_yaml

Document = dict[Any, Any]


@dataclass(frozen=True, slots=True)
class Note:
    """Comment before the next key: put it into a mapping as a key, with any value.

    A first empty line stays empty.
    """

    text: str


def text(*documents: Document) -> str:
    return "---\n".join("\n".join(_lines(document)) + "\n" for document in documents)


def _lines(data: Any) -> Iterator[str]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _comment(key) if isinstance(key, Note) else _pair(key, value)
    else:
        for value in data:
            yield from _item(value)


def _comment(note: Note) -> Iterator[str]:
    for number, line in enumerate(note.text.splitlines()):
        yield "" if not (line or number) else f"# {line}".rstrip()


def _pair(key: str, value: Any) -> Iterator[str]:
    if not _nested(value):
        yield from strict_yaml.dump({key: value}).rstrip("\n").split("\n")
        return
    yield strict_yaml.dump({key: {}}).rstrip("\n").removesuffix(" {}")
    for line in _lines(value):
        yield f"  {line}" if line else ""


def _item(value: Any) -> Iterator[str]:
    """Yield the lines of one item of a list. Comments at its beginning are written before the dash."""
    if not _nested(value):
        yield from strict_yaml.dump([value]).rstrip("\n").split("\n")
        return
    first = list(takewhile(lambda key: isinstance(key, Note), value)) if isinstance(value, dict) else []
    for note in first:
        yield from _comment(note)
    rest = {key: value[key] for key in value if key not in first} if first else value
    for number, line in enumerate(_lines(rest)):
        yield f"{'  ' if number else '- '}{line}" if line else ""


def _nested(value: Any) -> bool:
    """Return whether `value` needs lines of its own; scalars, `{}` and `[]` are written on the key's line."""
    return isinstance(value, dict | list) and bool(value)

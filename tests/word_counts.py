"""Counts words of a private dialect in the product, for tests/test_words.py.

    python tests/word_counts.py            write today's counts, where they are lower, into word_ceilings.json
    python tests/word_counts.py WORD...    print where they stand

In `names`: what a program binds, and its modules, split at `_` and capitals. In `strings`: literals with a blank that
are no docstrings and no routes, so what a person may read. In `prose`: docstrings and comments. What stays is right
use: columns of a table, Python packages, a lease in time, `ctx.report`.
"""

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
GENERATED = ROOT / "orchestrator" / "client" / "verbs"
"""Its words are those of orchestrator/verbs/, which count there."""
CEILINGS = Path(__file__).with_name("word_ceilings.json")
KINDS = ("names", "strings", "prose")
WORD, PART = re.compile(r"[a-z]+"), re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
COMMENT_OR_STRING = re.compile(
    r"""(#[^\n]*)|\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'""", re.DOTALL
)
"""A fifth of the time of `tokenize`."""
ROUTE = re.compile(r"[A-Z]+ /\S*")


class Use(NamedTuple):
    word: str
    kind: str
    path: str
    line: int


def uses(words: frozenset[str]) -> Iterator[Use]:
    """Every use of one of `words` in cluster/, workers/ and orchestrator/."""
    for path in (
        p for package in ("cluster", "workers", "orchestrator") for p in sorted((ROOT / package).rglob("*.py"))
    ):
        if path.is_relative_to(GENERATED):
            continue
        for kind, line, text in _texts(path):
            for word in PART.findall(text) if kind == "names" else WORD.findall(text.lower()):
                if word.lower() in words:
                    yield Use(word.lower(), kind, str(path.relative_to(ROOT)), line)


def _texts(path: Path) -> Iterator[tuple[str, int, str]]:
    source = path.read_text()
    nodes = list(ast.walk(ast.parse(source)))
    documents = {id(n.value) for n in nodes if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    yield "names", 1, path.stem
    for n in nodes:
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield "names", n.lineno, n.name
        elif isinstance(n, ast.arg):
            yield "names", n.lineno, n.arg
        elif isinstance(n, ast.Name | ast.Attribute) and isinstance(n.ctx, ast.Store):
            yield "names", n.lineno, n.id if isinstance(n, ast.Name) else n.attr
        elif isinstance(n, ast.Constant) and isinstance(n.value, str):
            if id(n) in documents:
                yield "prose", n.lineno, n.value
            elif " " in n.value and not ROUTE.fullmatch(n.value):
                yield "strings", n.lineno, n.value
    for found in COMMENT_OR_STRING.finditer(source):
        if found[1]:
            yield "prose", source.count("\n", 0, found.start()) + 1, found[1]


def ceilings() -> dict[str, list[int]]:
    """By word: the most names, strings and words of prose."""
    read: dict[str, list[int]] = json.loads(CEILINGS.read_text())
    return read


def counts(words: frozenset[str]) -> dict[str, list[int]]:
    count = Counter((use.word, use.kind) for use in uses(words))
    return {word: [count[word, kind] for kind in KINDS] for word in words}


def main() -> None:
    if words := frozenset(sys.argv[1:]):
        for use in uses(words):
            print(f"{use.path}:{use.line}: {use.word} ({use.kind})")
        return
    known = ceilings()
    now = counts(frozenset(known))
    lines = (
        f" {json.dumps(word)}: {[min(pair) for pair in zip(known[word], now[word], strict=True)]}" for word in known
    )
    CEILINGS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()

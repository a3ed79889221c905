"""Answers to stdout in the format asked for; messages and progress to stderr."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.show.text import escaped, visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

UNLIMITED_COLUMNS = 10_000


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


Output = Annotated[Format, typer.Option("--output", "-o", help="How to print the answer.", show_choices=True)]


def emit(data: Any, form: Format, table: "Callable[[Any], RenderableType]") -> None:
    """`data` on stdout: as JSON, as YAML, or as what `table` makes of it."""
    if form is Format.TABLE:
        console().print(table(data))
    else:
        write(as_json(data) if form is Format.JSON else as_yaml(data))


def as_json(data: Any, indent: int | None = 2) -> str:
    utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return escaped(json.dumps(data, indent=indent, ensure_ascii=not utf8))


def as_yaml(data: Any) -> str:
    from cluster.yaml import dump

    return dump(data).rstrip("\n")


def write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def say(message: str) -> None:
    """A message for the person at the terminal; never part of the answer."""
    sys.stderr.write(visible(message) + "\n")
    sys.stderr.flush()


def console() -> "Console":
    """For stdout. Where it is not a terminal, a table is as wide as its content and nothing is cut off."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    return Console(width=None if terminal else UNLIMITED_COLUMNS, highlight=False, markup=False, emoji=False)


@contextmanager
def waiting(what: str, after_s: float = 2.0) -> Iterator[Callable[[str], None]]:
    """Says on stderr what is waited for, once it takes longer than `after_s`. Yields a function that changes the words.

    On a terminal one line counts the seconds; elsewhere each new wording is one line.
    """
    state = {"what": what, "said": ""}
    done = threading.Event()
    started_s = time.monotonic()

    def update(words: str) -> None:
        state["what"] = words

    def show() -> None:
        tick_s = after_s
        while not done.wait(tick_s):
            tick_s = 0.5
            words = visible(state["what"]).replace("\n", " ")
            if sys.stderr.isatty():
                sys.stderr.write(f"\r\x1b[2K{words[:100]} ({time.monotonic() - started_s:.0f} s)")
                sys.stderr.flush()
            elif words != state["said"]:
                say(f"{words} …")
            state["said"] = words

    shower = threading.Thread(target=show, daemon=True)
    shower.start()
    try:
        yield update
    finally:
        done.set()
        shower.join()
        if state["said"] and sys.stderr.isatty():
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()

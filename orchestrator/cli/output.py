"""Answers to stdout in the format asked for; messages and progress to stderr."""

import io
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from cluster.errors import FleetError
from orchestrator.cli import completion_values
from orchestrator.cli.errors import BROKEN_PIPE
from orchestrator.show.terminal_text import escape_control, escape_document

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

UNLIMITED_COLUMNS = 10_000


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


Output = Annotated[Format, typer.Option("--output", "-o", help="Output format", show_choices=True)]
JobArgument = Annotated[
    str,
    typer.Argument(
        help="Job id, unique id prefix, or job name (the newest of that name)",
        metavar="JOB",
        autocompletion=completion_values.jobs,
    ),
]


def emit(data: Any, form: Format, table: "Callable[[Any], RenderableType]") -> None:
    """`data` on stdout: as JSON, as YAML, or as what `table` makes of it."""
    if form is Format.TABLE:
        write(render_table(table(data)))
    else:
        write(as_json(data) if form is Format.JSON else as_yaml(data))


def render_table(table: "RenderableType") -> str:
    """As text for stdout."""
    out = io.StringIO()
    console(out).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip("\n").split("\n"))


def as_json(data: Any, indent: int | None = 2) -> str:
    utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return escape_document(json.dumps(data, indent=indent, ensure_ascii=not utf8))


def as_yaml(data: Any) -> str:
    """Block style; where text would act on a terminal, which cannot be escaped there, YAML's flow style: JSON."""
    from cluster.strict_yaml import dump

    document = dump(data).rstrip("\n")
    return document if escape_document(document) == document else as_json(data)


def write(text: str, end: str = "\n") -> None:
    """`text` and a line end on stdout. Ends the command quietly when whoever read it has gone."""
    try:
        sys.stdout.write(text + end)
        sys.stdout.flush()
    except OSError as e:
        # Python flushes once more at exit and would complain: let that go nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(e, BrokenPipeError):
            raise typer.Exit(BROKEN_PIPE) from None
        raise FleetError(f"the answer cannot be written: {e.strerror}", "write it where space is free") from None


def print_message(message: str) -> None:
    """A message for the person at the terminal; never part of the answer."""
    sys.stderr.write(escape_control(message) + "\n")
    sys.stderr.flush()


def console(drawn: TextIO) -> "Console":
    """Draws as for stdout. Where that is not a terminal, a table is as wide as its content and nothing is cut off."""
    from rich.console import Console

    terminal = sys.stdout.isatty() or None
    return Console(
        file=drawn,
        force_terminal=terminal,
        width=None if terminal else UNLIMITED_COLUMNS,
        color_system=None if os.environ.get("NO_COLOR") else "auto",  # None: no bold either
        highlight=False,
        markup=False,
        emoji=False,
    )


@contextmanager
def screen() -> "Iterator[Callable[[RenderableType], None]]":
    """The whole terminal, until left. Yields what paints it anew."""
    from rich.live import Live

    with Live(console=console(sys.stdout), screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        yield lambda shown: live.update(shown, refresh=True)


@contextmanager
def progress_line(what: str, after_s: float = 2.0) -> Iterator[Callable[[str], None]]:
    """Says on stderr what is waited for, once it takes longer than `after_s`. Yields a function that changes the words.

    On a terminal one line counts the seconds; elsewhere each new wording is one line.
    """
    state = {"what": what, "said": "", "line": ""}
    done = threading.Event()
    started_s = time.monotonic()

    def update(words: str) -> None:
        state["what"] = words

    def show() -> None:
        tick_s = after_s
        while not done.wait(tick_s):
            tick_s = 0.5
            words = escape_control(state["what"]).replace("\n", " ")
            if sys.stderr.isatty():
                seconds = f" ({time.monotonic() - started_s:.0f} s)"
                state["line"] = _paint(words[: _columns() - len(seconds)] + seconds, state["line"])
            elif words != state["said"]:
                print_message(f"{words} …")
            state["said"] = words

    shower = threading.Thread(target=show, daemon=True)
    shower.start()
    try:
        yield update
    finally:
        done.set()
        shower.join()
        if state["line"]:
            _paint("", state["line"])


def _columns() -> int:
    """One less than the terminal has: a full line would wrap, and could not be painted over."""
    return shutil.get_terminal_size().columns - 1


def _paint(line: str, over: str) -> str:
    """`line` in place of what the terminal's last line shows, without any escape sequence. Returns `line`."""
    sys.stderr.write(f"\r{' ' * len(over)}\r{line}")
    sys.stderr.flush()
    return line

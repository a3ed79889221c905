"""Write results to stdout in the requested format, and messages and progress to stderr."""

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
from orchestrator.cli.terminal import completion_values
from orchestrator.cli.terminal.errors import BROKEN_PIPE
from orchestrator.terminal_text import escape_control, escape_document

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

UNLIMITED_COLUMNS = 10_000


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


Output = Annotated[Format, typer.Option("--output", "-o", help="Output format", show_choices=True)]
JOB_HELP = "Job id, unique id prefix, or job name (the newest of that name)"
JobArgument = Annotated[str, typer.Argument(help=JOB_HELP, metavar="JOB", autocompletion=completion_values.jobs)]
JobArguments = Annotated[
    list[str],
    typer.Argument(help=f"{JOB_HELP}; repeatable", metavar="JOB", autocompletion=completion_values.jobs),
]


def emit(data: Any, form: Format, table: "Callable[[Any], RenderableType]") -> None:
    """Write `data` to stdout: as JSON, as YAML, or as the table that `table` builds."""
    if form is Format.TABLE:
        write(render_table(table(data)))
    else:
        write(as_json(data) if form is Format.JSON else as_yaml(data))


def render_table(table: "RenderableType") -> str:
    """Render a table as text for stdout."""
    out = io.StringIO()
    console(out).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip("\n").split("\n"))


def as_json(data: Any, indent: int | None = 2) -> str:
    utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return escape_document(json.dumps(data, indent=indent, ensure_ascii=not utf8))


def as_yaml(data: Any) -> str:
    """Render YAML in block style; if a text has control characters, which cannot be escaped there, as JSON, which is
    YAML's flow style.
    """
    from cluster.input.strict_yaml import dump

    document = dump(data).rstrip("\n")
    return document if escape_document(document) == document else as_json(data)


def write(text: str, end: str = "\n") -> None:
    """Write `text` and a line end to stdout. If the reader has closed the pipe, exit without a message."""
    try:
        sys.stdout.write(text + end)
        sys.stdout.flush()
    except OSError as e:
        # Python flushes stdout again at exit and would print an error: redirect it to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(e, BrokenPipeError):
            raise typer.Exit(BROKEN_PIPE) from None
        raise FleetError(f"the output cannot be written: {e.strerror}", "write it to a disk with free space") from None


def print_message(message: str) -> None:
    """Print a message for the user to stderr; it is never part of the result."""
    sys.stderr.write(escape_control(message) + "\n")
    sys.stderr.flush()


def console(target: TextIO) -> "Console":
    """A console that renders as for stdout. If that is not a terminal, tables are as wide as their content."""
    from rich.console import Console

    terminal = sys.stdout.isatty() or None
    return Console(
        file=target,
        force_terminal=terminal,
        width=None if terminal else UNLIMITED_COLUMNS,
        color_system=None if os.environ.get("NO_COLOR") else "auto",  # None: no bold either
        highlight=False,
        markup=False,
        emoji=False,
    )


@contextmanager
def screen() -> "Iterator[Callable[[RenderableType], None]]":
    """Use the full terminal screen within the context. Yields a function that repaints it."""
    from rich.live import Live

    with Live(console=console(sys.stdout), screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        yield lambda renderable: live.update(renderable, refresh=True)


@contextmanager
def progress_line(text: str, after_s: float = 2.0) -> Iterator[Callable[[str], None]]:
    """Show on stderr what the command waits for, after `after_s` seconds. Yields a function that changes the text.

    On a terminal, one line counts the seconds; elsewhere, each new text is printed as one line.
    """
    state = {"what": text, "said": "", "line": ""}
    done = threading.Event()
    started_s = time.monotonic()

    def update(new_text: str) -> None:
        state["what"] = new_text

    def show() -> None:
        tick_s = after_s
        while not done.wait(tick_s):
            tick_s = 0.5
            line_text = escape_control(state["what"]).replace("\n", " ")
            if sys.stderr.isatty():
                seconds = f" ({time.monotonic() - started_s:.0f} s)"
                state["line"] = _paint(line_text[: _columns() - len(seconds)] + seconds, state["line"])
            elif line_text != state["said"]:
                print_message(f"{line_text} …")
            state["said"] = line_text

    painter = threading.Thread(target=show, daemon=True)
    painter.start()
    try:
        yield update
    finally:
        done.set()
        painter.join()
        if state["line"]:
            _paint("", state["line"])


def _columns() -> int:
    """Width of a line: one less than the terminal's, because a full line would wrap and could not be overwritten."""
    return shutil.get_terminal_size().columns - 1


def _paint(line: str, over: str) -> str:
    """Overwrite the text `over` in the terminal's last line by `line`, without escape sequences. Returns `line`."""
    sys.stderr.write(f"\r{' ' * len(over)}\r{line}")
    sys.stderr.flush()
    return line

"""The verbs `exec` and `shell`: a command beside the ranks of a running job, its streams as if it ran here."""

import base64
import getpass
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.errors import FleetError, PolyfleetError, UserError
from orchestrator.cli.errors import BROKEN_PIPE, INTERRUPTED
from orchestrator.cli.escape_sequence import Escape
from orchestrator.cli.output import JobArgument, print_message

if TYPE_CHECKING:
    from orchestrator.client import Client

Data = dict[str, Any]
Told = Iterator[tuple[str, Data]]
Rank = Annotated[int, typer.Option("--rank", help="Rank beside which the command runs", min=0)]
PIECE_BYTES = 64 << 10
SIGNAL_CODE = 128
RESIZED, DONE = b"r", b"d"


def exec_(ctx: typer.Context, ref: JobArgument, rank: Rank = 0) -> None:
    """Run a command beside a running job, after `--`: its variables, its folder, its devices. Ends with its exit code.

    What comes on standard input is handed on, unless that is a terminal. It ends with the attempt, or when this ends.
    """
    from orchestrator.client import connect

    command = ctx.meta["command"]
    if not command:
        raise UserError("no command", f"write it after `--`: `polyfleet exec {ref} -- nvidia-smi`")
    takes_input = not sys.stdin.isatty()
    with connect(progress=print_message) as client:
        order = {"command": command, "rank": rank, "input": takes_input, "by": _who()}
        told = client.exec_run(ref, order)
        begun = _begun(told)
        if takes_input:
            threading.Thread(target=_hand_on, args=(client, begun["exec"]), name="input", daemon=True).start()
        code = _to_its_end(client, begun, told)
    raise typer.Exit(code)


def shell(ref: JobArgument, rank: Rank = 0) -> None:
    """A shell beside a running job, at this terminal: its variables, its folder, its devices. Enter, then `~.` leaves
    it.

    It ends with the attempt, after an hour in which nothing happens, and when this ends.
    """
    from orchestrator.client import connect

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError("a shell needs a terminal", f"run one command with `polyfleet exec {ref} -- COMMAND`")
    order = {"command": [], "rank": rank, "terminal": True, "by": _who(), **_size()}
    with connect(progress=print_message) as client:
        told = client.exec_run(ref, order | {"term": os.environ.get("TERM", "")[:64]})
        begun = _begun(told)
        print_message(f"{begun['job']}, rank {begun['rank']} on node {begun['node']}; Enter, then ~. leaves")
        with _raw_keyboard(client, begun["exec"]) as keyboard:
            code = _to_its_end(client, begun, told, keyboard)
    raise typer.Exit(code)


def _size() -> dict[str, int]:
    """Of this terminal; what a terminal has that does not tell."""
    try:
        size = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        size = os.terminal_size((80, 24))
    return {"rows": max(size.lines, 1), "columns": max(size.columns, 1)}


def _who() -> str:
    with suppress(Exception):  # nobody of that number is in the system's list
        return f"{getpass.getuser()}@{socket.gethostname()}"[:200]
    return ""


def _begun(told: Told) -> Data:
    """{"exec", "job", "epoch", "rank", "node"}. Raises FleetError."""
    for _, data in told:
        return data
    raise _server_ended()


def _server_ended() -> FleetError:
    return FleetError("the server has ended, and the command with it", "the job goes on; run the command again")


def _to_its_end(client: "Client", begun: Data, told: Told, keyboard: "Keyboard | None" = None) -> int:
    """Writes what it writes; its exit code. Raises FleetError where it was ended."""
    try:
        for name, data in told:
            if name == "output":
                _write(data["stream"], base64.b64decode(data["data"]))
            elif name == "end":
                return _code(data, begun)
    except KeyboardInterrupt:
        _end(client, begun["exec"])
        return INTERRUPTED
    except PolyfleetError:
        if keyboard is None or not keyboard.left:
            raise
        return INTERRUPTED
    raise _server_ended()


def _code(end: Data, begun: Data) -> int:
    if end["code"] is None:
        raise FleetError(
            f"the command beside {begun['job']} was ended: {end['reason']}", f"`polyfleet show {begun['job']}`"
        )
    code = int(end["code"])
    return code if code >= 0 else SIGNAL_CODE - code


def _end(client: "Client", known: str) -> None:
    with suppress(PolyfleetError):
        client.exec_end(known)


def _write(stream: str, data: bytes) -> None:
    out = sys.stderr if stream == "stderr" else sys.stdout
    try:
        out.buffer.write(data)
        out.flush()
    except OSError as e:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # as in output.write
        if isinstance(e, BrokenPipeError):
            raise typer.Exit(BROKEN_PIPE) from None
        raise FleetError(f"the output cannot be written: {e.strerror}", "write it where space is free") from None


def _hand_on(client: "Client", known: str) -> None:
    """Standard input, to its end or until the command takes no more."""
    sender = _Sender(client, known)
    with suppress(PolyfleetError):  # it has ended; how is told by its output
        while sender.open:
            try:
                piece = os.read(sys.stdin.fileno(), PIECE_BYTES)
            except OSError:
                piece = b""
            sender.send(piece, end=not piece)
            if not piece:
                return


class _Sender:
    """`open`: the command takes more."""

    def __init__(self, client: "Client", known: str):
        self._client, self._known = client, known
        self._taken = 0
        self.open = True

    def send(self, data: bytes, end: bool = False) -> None:
        """All of it, however long the command takes. An answer that was lost is asked for again: offsets tell."""
        until = self._taken + len(data)
        while self.open:
            left = data[len(data) - (until - self._taken) :]
            told = self._client.exec_input(self._known, self._taken, left, end)
            self._taken, self.open = told["taken"], not told["closed"]
            if self._taken >= until:
                return


class Keyboard:
    """Hands on what is typed, and the size of the terminal. `left`: the user has left by the escape."""

    def __init__(self, client: "Client", known: str):
        self._client, self._known = client, known
        self._waken, self._wake = os.pipe()
        self.left = False

    def tell(self, what: bytes) -> None:
        os.write(self._wake, what)

    def run(self) -> None:
        sender, escape = _Sender(self._client, self._known), Escape()
        with suppress(PolyfleetError):  # it has ended; how is told by its output
            while sender.open:
                ready, _, _ = select.select([sys.stdin.fileno(), self._waken], [], [])
                if self._waken in ready:
                    if DONE in os.read(self._waken, 64):
                        return
                    self._client.exec_resize(self._known, **_size())
                    continue
                typed, self.left = escape.feed(os.read(sys.stdin.fileno(), PIECE_BYTES))
                if typed:
                    sender.send(typed)
                if self.left:
                    self._client.exec_end(self._known)
                    return


@contextmanager
def _raw_keyboard(client: "Client", known: str) -> Iterator[Keyboard]:
    """Every key goes to the program there, Ctrl-C too. The terminal is afterwards as it was."""
    import termios
    import tty

    keyboard = Keyboard(client, known)
    thread = threading.Thread(target=keyboard.run, name="keyboard", daemon=True)
    before = termios.tcgetattr(sys.stdin)
    resized = signal.signal(signal.SIGWINCH, lambda *_: keyboard.tell(RESIZED))
    try:
        tty.setraw(sys.stdin, termios.TCSADRAIN)  # what was typed already is not lost
        thread.start()
        keyboard.tell(RESIZED)  # it may have been since it was asked for
        yield keyboard
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        signal.signal(signal.SIGWINCH, resized)
        keyboard.tell(DONE)
        thread.join(1.0)

"""The commands `exec` and `shell`: run a command beside a rank of a running job, with its streams connected to this
terminal.
"""

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
from orchestrator.cli.terminal.errors import BROKEN_PIPE, INTERRUPTED
from orchestrator.cli.terminal.output import JobArgument, print_message

if TYPE_CHECKING:
    from orchestrator.client.client import Client

Data = dict[str, Any]
ExecEvents = Iterator[tuple[str, Data]]
Rank = Annotated[int, typer.Option("--rank", help="Rank beside which the command runs", min=0)]
PIECE_BYTES = 64 << 10
SIGNAL_CODE = 128
RESIZED, DONE = b"r", b"d"
LEAVE, TILDE, NEWLINES = ord("."), ord("~"), b"\r\n"


def exec_(ctx: typer.Context, ref: JobArgument, rank: Rank = 0) -> None:
    """Run a command, written after `--`, beside a running job: with its variables, folder and devices. Exits with the
    command's exit code.

    Standard input is passed on unless it is a terminal. The command is stopped when the attempt ends or this client
    does.
    """
    from orchestrator.client.client import connect

    command = ctx.meta["command"]
    if not command:
        raise UserError("no command", f"write it after `--`: `polyfleet exec {ref} -- nvidia-smi`")
    has_input = not sys.stdin.isatty()
    with connect(progress=print_message) as client:
        order: Data = {"command": command, "rank": rank, "takes_input": has_input, "by": _user_name()}
        events = client.execs.start(ref, **order)
        started = _wait_started(events)
        if has_input:
            threading.Thread(target=_forward_stdin, args=(client, started["exec"]), name="input", daemon=True).start()
        code = _relay_output(client, started, events)
    raise typer.Exit(code)


def shell(ref: JobArgument, rank: Rank = 0) -> None:
    """Open a shell beside a running job in this terminal: with its variables, folder and devices. Leave it with Enter,
    then `~.`.

    The shell is stopped when the attempt ends, after an hour without activity, and when this client ends.
    """
    from orchestrator.client.client import connect

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError("a shell needs a terminal", f"run one command with `polyfleet exec {ref} -- COMMAND`")
    order: Data = {"command": [], "rank": rank, "terminal": True, "by": _user_name(), **_size()}
    with connect(progress=print_message) as client:
        events = client.execs.start(ref, **order, term=os.environ.get("TERM", "")[:64])
        started = _wait_started(events)
        print_message(f"{started['job']}, rank {started['rank']} on node {started['node']}; Enter, then ~. leaves")
        with _raw_keyboard(client, started["exec"]) as keyboard:
            code = _relay_output(client, started, events, keyboard)
    raise typer.Exit(code)


def _size() -> dict[str, int]:
    """Size of this terminal; 80 by 24 if it is unknown."""
    try:
        size = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        size = os.terminal_size((80, 24))
    return {"rows": max(size.lines, 1), "columns": max(size.columns, 1)}


def _user_name() -> str:
    with suppress(Exception):  # the system may have no user with this uid
        return f"{getpass.getuser()}@{socket.gethostname()}"[:200]
    return ""


def _wait_started(events: ExecEvents) -> Data:
    """First event of the command: {"exec", "job", "attempt", "rank", "node"}. Raises FleetError."""
    for _, data in events:
        return data
    raise _server_stopped()


def _server_stopped() -> FleetError:
    return FleetError("the server stopped, and the command with it", "run the command again; the job is still running")


def _relay_output(client: "Client", started: Data, events: ExecEvents, keyboard: "Keyboard | None" = None) -> int:
    """Write the command's output until it ends; return its exit code. Raises FleetError if it was stopped."""
    try:
        for name, data in events:
            if name == "output":
                _write(data["stream"], base64.b64decode(data["data"]))
            elif name == "end":
                return _code(data, started)
    except KeyboardInterrupt:
        _end(client, started["exec"])
        return INTERRUPTED
    except PolyfleetError:
        if keyboard is None or not keyboard.has_left:
            raise
        return INTERRUPTED
    raise _server_stopped()


def _code(end: Data, started: Data) -> int:
    if end["code"] is None:
        raise FleetError(
            f"the command beside {started['job']} was stopped: {end['reason']}",
            f"`polyfleet show {started['job']}` shows the job's state",
        )
    code = int(end["code"])
    return code if code >= 0 else SIGNAL_CODE - code


def _end(client: "Client", exec_id: str) -> None:
    with suppress(PolyfleetError):
        client.execs.end(exec_id)


def _write(stream: str, data: bytes) -> None:
    out = sys.stderr if stream == "stderr" else sys.stdout
    try:
        out.buffer.write(data)
        out.flush()
    except OSError as e:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # as in output.write
        if isinstance(e, BrokenPipeError):
            raise typer.Exit(BROKEN_PIPE) from None
        raise FleetError(f"the output cannot be written: {e.strerror}", "write it to a disk with free space") from None


def _forward_stdin(client: "Client", exec_id: str) -> None:
    """Forward standard input to its end, or until the command accepts no more."""
    sender = _Sender(client, exec_id)
    with suppress(PolyfleetError):  # the command has ended; its event stream reports how
        while sender.open:
            try:
                piece = os.read(sys.stdin.fileno(), PIECE_BYTES)
            except OSError:
                piece = b""
            sender.send(piece, end=not piece)
            if not piece:
                return


class _Sender:
    """Sends input to a command. `open`: the command accepts more."""

    def __init__(self, client: "Client", exec_id: str):
        self._client, self._exec_id = client, exec_id
        self._accepted_bytes = 0
        self.open = True

    def send(self, data: bytes, end: bool = False) -> None:
        """Send all data, however long the command takes. If a response is lost, the data is sent again: offsets prevent
        duplicates.
        """
        until = self._accepted_bytes + len(data)
        while self.open:
            remaining = data[len(data) - (until - self._accepted_bytes) :]
            encoded = base64.b64encode(remaining).decode()
            reply = self._client.execs.write(self._exec_id, encoded, self._accepted_bytes, end=end)
            self._accepted_bytes, self.open = reply["taken"], not reply["closed"]
            if self._accepted_bytes >= until:
                return


class Keyboard:
    """Forwards typed bytes and the size of the terminal. `has_left`: the user has left by the escape sequence."""

    def __init__(self, client: "Client", exec_id: str):
        self._client, self._exec_id = client, exec_id
        self._wake_reader, self._wake_writer = os.pipe()
        self.has_left = False

    def wake(self, signal_byte: bytes) -> None:
        os.write(self._wake_writer, signal_byte)

    def run(self) -> None:
        sender, escape = _Sender(self._client, self._exec_id), EscapeFilter()
        with suppress(PolyfleetError):  # the command has ended; its event stream reports how
            while sender.open:
                ready, _, _ = select.select([sys.stdin.fileno(), self._wake_reader], [], [])
                if self._wake_reader in ready:
                    if DONE in os.read(self._wake_reader, 64):
                        return
                    self._client.execs.resize(self._exec_id, **_size())
                    continue
                typed, self.has_left = escape.feed(os.read(sys.stdin.fileno(), PIECE_BYTES))
                if typed:
                    sender.send(typed)
                if self.has_left:
                    self._client.execs.end(self._exec_id)
                    return


@contextmanager
def _raw_keyboard(client: "Client", exec_id: str) -> Iterator[Keyboard]:
    """Send every key to the remote program, including Ctrl-C. Restores the terminal's settings at the end."""
    import termios
    import tty

    keyboard = Keyboard(client, exec_id)
    thread = threading.Thread(target=keyboard.run, name="keyboard", daemon=True)
    before = termios.tcgetattr(sys.stdin)
    resized = signal.signal(signal.SIGWINCH, lambda *_: keyboard.wake(RESIZED))
    try:
        tty.setraw(sys.stdin, termios.TCSADRAIN)  # keeps bytes that were already typed
        thread.start()
        keyboard.wake(RESIZED)  # the size may have changed since the request was sent
        yield keyboard
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        signal.signal(signal.SIGWINCH, resized)
        keyboard.wake(DONE)
        thread.join(1.0)


class EscapeFilter:
    """Filter for typed bytes that finds Enter, then `~.`: as in ssh, this leaves even a shell that does not respond.

    `~~` at the start of a line sends one `~`; `~` before another character is sent, too.
    """

    def __init__(self) -> None:
        self._at_line_start, self._pending_tilde = True, False

    def feed(self, typed: bytes) -> tuple[bytes, bool]:
        """Return (bytes to send, whether to leave)."""
        sent = bytearray()
        for char in typed:
            if self._pending_tilde:
                self._pending_tilde = False
                if char == LEAVE:
                    return bytes(sent), True
                if char != TILDE:
                    sent.append(TILDE)
            elif self._at_line_start and char == TILDE:
                self._pending_tilde, self._at_line_start = True, False
                continue
            sent.append(char)
            self._at_line_start = char in NEWLINES
        return bytes(sent), False

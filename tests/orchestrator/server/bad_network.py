"""A network between client and server that does what networks do: real sockets, one fault for each connection."""

import asyncio
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from patience import LIMIT_S


@dataclass(frozen=True)
class Fault:
    """Of one connection. Bytes are counted from its beginning; None: never.

    `cut_request_at`, `cut_answer_at`: both ends are closed once so many bytes went that way. `half_closed_at`: the
    server hears no more from the client after so many. `delay_s`: before every piece. `doubled`: what the client sends
    reaches the server twice, on two connections; the second's answers go nowhere.
    """

    cut_request_at: int | None = None
    cut_answer_at: int | None = None
    half_closed_at: int | None = None
    delay_s: float = 0.0
    doubled: bool = False
    reset: bool = False


NONE = Fault()


class Network:
    """`address` is a Unix socket for a client. Connection number n (from 0) has the fault `faults(n)`. `broken` of them
    were cut, `doubled` reached the server twice.
    """

    def __init__(self, folder: Path, server: Path, faults: Callable[[int], Fault]):
        folder.mkdir(mode=0o700, exist_ok=True)
        self.path = folder / f"net-{os.urandom(4).hex()}"
        self.connections = self.broken = self.doubled = 0
        self._server, self._faults = server, faults
        self._ready = threading.Event()
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def address(self) -> str:
        return f"unix:{self.path}"

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        listening = await asyncio.start_unix_server(self._connected, self.path)
        self._ready.set()
        await self._stop.wait()
        listening.close()
        for writer in list(self._open):
            writer.transport.abort()
        while self._open:
            await asyncio.sleep(0.001)

    async def _connected(self, near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        fault, self.connections = self._faults(self.connections), self.connections + 1
        opened, ways = [near_out], set()
        self._open.add(near_out)
        try:
            far_in, far_out = await asyncio.open_unix_connection(str(self._server))
            opened.append(far_out)
            to = [far_out]
            if fault.doubled:
                echo_in, echo_out = await asyncio.open_unix_connection(str(self._server))
                opened.append(echo_out)
                to.append(echo_out)
                self.doubled += 1
                ways.add(asyncio.ensure_future(_swallow(echo_in)))
            request = _pump(near_in, to, fault.cut_request_at, fault.delay_s, fault.half_closed_at)
            answer = _pump(far_in, [near_out], fault.cut_answer_at, fault.delay_s, None)
            ways |= {asyncio.ensure_future(request), asyncio.ensure_future(answer)}
            left = set(ways)
            while left:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                if any(not task.result() for task in done):
                    self.broken += 1
                    break
        finally:
            for writer in opened:
                if fault.reset:
                    linger = struct.pack("ii", 1, 0)
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()
            await asyncio.gather(*ways, return_exceptions=True)
            for writer in opened:
                with suppress(OSError):
                    await writer.wait_closed()
            self._open.discard(near_out)

    @contextmanager
    def up(self) -> Iterator["Network"]:
        thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        thread.start()
        assert self._ready.wait(LIMIT_S)
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._stop.set)
            thread.join(LIMIT_S)


async def _pump(
    source: asyncio.StreamReader,
    to: list[asyncio.StreamWriter],
    cut_at: int | None,
    delay_s: float,
    half_closed_at: int | None,
) -> bool:
    """Until the source ends (True), or the connection is to be cut (False)."""
    went = 0
    while data := await _piece(source):
        await asyncio.sleep(delay_s)
        limit = cut_at if half_closed_at is None else half_closed_at
        data = data if limit is None else data[: max(limit - went, 0)]
        went += len(data)
        for writer in to:
            with suppress(OSError):
                writer.write(data)
                await writer.drain()
        if half_closed_at is not None and went >= half_closed_at:
            break
        if cut_at is not None and went >= cut_at:
            return False
    for writer in to:
        with suppress(OSError):
            writer.write_eof()
    return True


async def _piece(source: asyncio.StreamReader) -> bytes:
    """Nothing at its end, however it ended."""
    try:
        return await source.read(65536)
    except OSError:
        return b""


async def _swallow(source: asyncio.StreamReader) -> bool:
    while await _piece(source):
        pass
    return True

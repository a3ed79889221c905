"""A supervisor rings when its attempt has started or ended: the agent looks at once, and not only at its next look.

The bell is a named pipe beside the records. Nothing depends on it: whoever steals a ring costs the agent some
milliseconds, and whoever rings without need makes it look, at most every RING_AT_MOST_EVERY_S.
"""

import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

NAME = ".bell"
RING_AT_MOST_EVERY_S = 0.002


def notify(records: Path) -> None:
    """Tell the agent of that folder of records, if it is there."""
    with suppress(OSError):
        descriptor = os.open(records / NAME, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.write(descriptor, b"1")
        finally:
            os.close(descriptor)


def watch(records: Path, owner: Any, heard: Callable[[Any], object]) -> None:
    """Call `heard(owner)` in a thread at every ring, for as long as there is an owner. Without named pipes: never."""
    path = records / NAME
    try:
        with suppress(FileNotFoundError):
            path.unlink()
        os.mkfifo(path, 0o600)
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    woken = threading.Event()
    gone = weakref.finalize(owner, _wake, descriptor, woken)
    gone.atexit = False
    arguments = (descriptor, weakref.ref(owner), heard, woken)
    threading.Thread(target=_listen, args=arguments, name="bell", daemon=True).start()


def _wake(descriptor: int, woken: threading.Event) -> None:
    """The owner is gone: end the thread, which closes the descriptor once nothing writes to it any more."""
    with suppress(BlockingIOError):  # full of rings: the thread is awake
        os.write(descriptor, b"0")
    woken.set()


def _listen(descriptor: int, owner: Callable[[], Any], heard: Callable[[Any], object], woken: threading.Event) -> None:
    poll = select.poll()  # `select.select` refuses descriptors from 1,024 on
    poll.register(descriptor, select.POLLIN)
    while True:
        poll.poll()
        with suppress(BlockingIOError):
            os.read(descriptor, 1 << 16)
        it = owner()
        if it is None:
            woken.wait()  # closed before, its number could be another file when `_wake` writes to it
            os.close(descriptor)
            return
        heard(it)
        del it
        time.sleep(RING_AT_MOST_EVERY_S)

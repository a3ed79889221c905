"""Named pipe by which a supervisor wakes the agent when its attempt has started or ended.

The agent then need not wait for its next poll. The pipe is beside the records, and nothing depends on it: a wake-up
that is lost costs the agent some milliseconds, and one without need makes it poll, at most every MIN_INTERVAL_S.
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

NAME = ".wakeup"
MIN_INTERVAL_S = 0.002


def notify(records: Path) -> None:
    """Wake the agent of this folder of records, if it runs."""
    with suppress(OSError):
        descriptor = os.open(records / NAME, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.write(descriptor, b"1")
        finally:
            os.close(descriptor)


def watch(records: Path, owner: Any, on_wakeup: Callable[[Any], object]) -> None:
    """Call `on_wakeup(owner)` in a thread at each wake-up while `owner` exists; never without named pipes."""
    path = records / NAME
    try:
        with suppress(FileNotFoundError):
            path.unlink()
        os.mkfifo(path, 0o600)
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    woken = threading.Event()
    finalizer = weakref.finalize(owner, _end_thread, descriptor, woken)
    finalizer.atexit = False
    arguments = (descriptor, weakref.ref(owner), on_wakeup, woken)
    threading.Thread(target=_listen, args=arguments, name="bell", daemon=True).start()


def _end_thread(descriptor: int, woken: threading.Event) -> None:
    """End the thread of an owner that was deleted.

    The thread closes the descriptor once nothing writes to it any more.
    """
    with suppress(BlockingIOError):  # the pipe is full, so the thread is awake
        os.write(descriptor, b"0")
    woken.set()


def _listen(
    descriptor: int, owner_ref: Callable[[], Any], on_wakeup: Callable[[Any], object], woken: threading.Event
) -> None:
    poll = select.poll()  # `select.select` refuses descriptors from 1,024 on
    poll.register(descriptor, select.POLLIN)
    while True:
        poll.poll()
        with suppress(BlockingIOError):
            os.read(descriptor, 1 << 16)
        owner = owner_ref()
        if owner is None:
            woken.wait()  # if it were closed before, `_end_thread` could write to another file with its number
            os.close(descriptor)
            return
        on_wakeup(owner)
        del owner
        time.sleep(MIN_INTERVAL_S)

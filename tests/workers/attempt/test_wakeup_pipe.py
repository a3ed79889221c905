"""The thread that listens to a bell ends with its owner, and closes the pipe after the last write to it."""

import gc
import os
import select
import threading

import pytest
from patience import LIMIT_S

from workers.protocol import wakeup_pipe


def test_a_ring_while_the_owner_goes_away_closes_nothing_that_is_still_written_to(tmp_path):
    """A garbage collector clears references first and calls finalizers later: a ring may come in between."""
    os.mkfifo(tmp_path / "pipe")
    descriptor = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)
    woken = threading.Event()
    thread = threading.Thread(target=wakeup_pipe._listen, args=(descriptor, lambda: None, None, woken))
    thread.start()
    os.write(descriptor, b"1")
    thread.join(0.2)  # with the fault, it closes the descriptor now
    assert thread.is_alive()
    wakeup_pipe._end_thread(descriptor, woken)
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_the_thread_ends_when_its_owner_is_collected(tmp_path):
    class Owner:
        heard = threading.Event()

    owner = Owner()
    before = set(threading.enumerate())
    wakeup_pipe.watch(tmp_path, owner, lambda it: it.heard.set())
    [thread] = set(threading.enumerate()) - before
    wakeup_pipe.notify(tmp_path)
    assert Owner.heard.wait(LIMIT_S)
    owner = None
    gc.collect()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_a_pipe_that_is_full_of_rings_still_wakes_the_thread(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    descriptor = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)
    while select.select([], [descriptor], [], 0)[1]:
        os.write(descriptor, bytes(4096))
    woken = threading.Event()
    wakeup_pipe._end_thread(descriptor, woken)
    assert woken.is_set()
    os.close(descriptor)

"""A command at a terminal of its own, as a person sits at one."""

import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from patience import LIMIT_S

LEAD = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
"""The terminal becomes that of its session: Ctrl-C typed is a signal then, as for a user."""


class Terminal:
    """`seen` is what it wrote and `shows` has not passed yet."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str] | None = None):
        self.screen, theirs = os.openpty()
        variables = dict(os.environ if environ is None else environ) | {"TERM": "xterm"}
        self.child = subprocess.Popen(
            [sys.executable, "-c", LEAD, *command], env=variables, start_new_session=True,
            stdin=theirs, stdout=theirs, stderr=theirs,
        )  # fmt: skip
        os.close(theirs)
        self.seen = b""

    def shows(self, text: bytes) -> bytes:
        """Wait until it does; what it wrote before."""
        end = time.monotonic() + LIMIT_S
        while text not in self.seen:
            assert time.monotonic() < end, self.seen
            assert self._more() or text in self.seen, self.seen
        before, _, self.seen = self.seen.partition(text)
        return before

    def _more(self) -> bool:
        """False once the other end is closed."""
        if not select.select([self.screen], [], [], 0.1)[0]:
            return True
        try:
            piece = os.read(self.screen, 65536)
        except OSError:  # how Linux says it
            return False
        self.seen += piece
        return bool(piece)

    def type(self, data: bytes) -> None:
        os.write(self.screen, data)

    def code(self) -> int:
        """Its exit code; what it still writes is read meanwhile."""
        end = time.monotonic() + LIMIT_S
        while self._more():
            assert time.monotonic() < end, self.seen
        return self.child.wait(LIMIT_S)

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()
        os.close(self.screen)

"""Save while training continues: copy the state, return, and write the copy in a thread. One save at a time.

The copy is in memory that the next save reuses, laid out as the files will be. The thread hashes it and writes it,
which costs the training next to nothing. CPU tensors are copied like all others, because a training step changes them.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from workers.checkpoint.disk.files import Files
from workers.checkpoint.disk.writer import Arena, Progress
from workers.checkpoint.saving.saver import PreparedSave, Saved, prepare, write


class SaveInProgress:
    """A save that is being written. `result()` waits for it; `path` is where the checkpoint will be."""

    def __init__(self, prepared: PreparedSave, blocked_s: float, work: Callable[[], Saved]):
        self.path = prepared.to.path
        self.step = prepared.manifest.step
        self.blocked_s = blocked_s
        self.result_was_read = False
        self._saved: Saved | None = None
        self._error: BaseException | None = None
        # Not a daemon thread: a process that exits now still finishes its save.
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"save-{self.step}")

    def start(self) -> None:
        self._thread.start()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait_until_ended(self) -> None:
        """Wait until the save has ended, whether it succeeded or failed."""
        self._thread.join()

    def result(self, timeout_s: float | None = None) -> Saved:
        """Wait until the checkpoint is durable. Raises the save's CheckpointError, or TimeoutError."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"step {self.step} is still being saved after {timeout_s} s")
        self.result_was_read = True
        if self._error is not None:
            raise self._error
        assert self._saved is not None
        return replace(self._saved, blocked_s=self.blocked_s)

    def _run(self, work: Callable[[], Saved]) -> None:
        try:
            self._saved = work()
        except BaseException as e:
            self._error = e


class BackgroundSaver:
    """Write one save at a time, and keep the memory for its copy."""

    def __init__(self) -> None:
        self._arena = Arena()
        self._last: SaveInProgress | None = None

    def save(
        self,
        root: str | os.PathLike[str],
        step: int,
        state: Mapping[str, Any],
        *,
        keep: int | None = None,
        attempt: str | None = None,
        kind: str = "",
        progress: Progress | None = None,
        on_done: Callable[[Saved], None] | None = None,
        around: "Callable[[PreparedSave], AbstractContextManager[Any]]" = nullcontext,
        files: Files | None = None,
    ) -> SaveInProgress:
        """Like workers.checkpoint.save, but return once the state is copied.
        A save that is still being written is waited for first. If it failed, its error is raised here, unless the
        caller already got it from `result`. `on_done` runs in the thread. The thread writes inside `around`, which may
        refuse the copy.
        """
        started_s = time.perf_counter()
        self.wait()
        prepared = prepare(root, step, state, keep=keep, attempt=attempt, kind=kind, files=files)
        prepared.snapshot(self._arena)

        def work() -> Saved:
            with around(prepared):
                saved = write(prepared, keep, progress)
            if on_done is not None:
                on_done(replace(saved, blocked_s=saving.blocked_s))
            return saved

        saving = SaveInProgress(prepared, time.perf_counter() - started_s, work)
        self._last = saving
        saving.start()
        return saving

    def wait_below(self, root: "str | os.PathLike[str]") -> None:
        """Wait until nothing is being written below `root`. Does not raise the save's errors."""
        last = self._last
        if last is not None and str(last.path).startswith(str(root).rstrip("/")):
            last.wait_until_ended()

    def wait(self) -> Saved | None:
        """Wait until no save is in progress. Raises the error of the last save, once."""
        last, self._last = self._last, None
        return last.result() if last is not None and not (last.done() and last.result_was_read) else None


SHARED = BackgroundSaver()
"""The saver of this process: one save in progress, memory for one copy."""

"""Notices that this node is about to go: a file that says so, in its folder or where POLYFLEET_NOTICE_FILE names.

The node's own top process writes one when it is told to end (cluster/termination_notice.py), and whoever knows
that a machine will be taken away may: a cloud's agent, a batch system's epilogue. It holds JSON, {"reason": text,
"grace_s": seconds}, of which either may be left out, or nothing. It is withdrawn by removing it.
"""

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from cluster.termination_notice import FILE, GRACE_S
from cluster.types import Notice
from cluster.untrusted_files import UnreadableFile, parse_json, read_bytes
from workers.attempt import lease
from workers.attempt.attempts import AttemptManager

VARIABLE = "POLYFLEET_NOTICE_FILE"
NODE_DIR = "POLYFLEET_NODE_DIR"
LOOK_EVERY_S = 0.25
HEEDED_S = 2.0
"""How long the controller has to ask attempts to save; then the agent does, within a quarter of the time there is."""
LONGEST_GRACE_S = 7 * 86_400.0
MOST_BYTES = 4096
LONGEST_REASON = 200
LOG = logging.getLogger(__name__)
UNTOLD = "its machine was given notice"


def files(node_dir: Path, environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Where a notice may lie. An agent of another fleet than the node's own looks into the node's folder, too."""
    named = [Path(environ[NODE_DIR]) / FILE] if environ.get(NODE_DIR) else []
    given = [Path(environ[VARIABLE])] if environ.get(VARIABLE) else []
    return tuple(dict.fromkeys((node_dir / FILE, *named, *given)))


class NoticeWatcher:
    """Of one node. `told` is called when one comes, changes or is withdrawn. Attempts that nobody has asked to save by
    then are asked.
    """

    def __init__(self, paths: Iterable[Path], attempts: AttemptManager, told: Callable[[], None]):
        self._paths = tuple(paths)
        self._attempts = attempts
        self._told = told
        self._seen: tuple[Path, int] | None = None
        self._reason, self._since_s, self._until_s = "", 0.0, 0.0

    def follow(self) -> None:
        """From now on, in a thread of its own, for as long as anybody has us."""
        threading.Thread(target=_follow, args=(weakref.ref(self),), name="notices", daemon=True).start()

    @property
    def current(self) -> Notice | None:
        if self._seen is None:
            return None
        return Notice(self._reason, round(max(0.0, self._until_s - lease.now_s()), 1))

    def look(self) -> None:
        found = next(((path, at) for path in self._paths if (at := _written(path)) is not None), None)
        if found != self._seen:
            self._seen = found
            if found is not None:
                self._read(found[0])
            self._told()
        if self._seen is not None and lease.now_s() >= self._since_s + self._heeded_s():
            for attempt in self._attempts.live():
                self._attempts.stop(attempt.id.job, attempt.id.epoch, "preempt")

    def _heeded_s(self) -> float:
        return min(HEEDED_S, (self._until_s - self._since_s) / 4)

    def _read(self, path: Path) -> None:
        """The time of the file counts where it makes sense: an agent that was restarted meanwhile has less left."""
        said = _said(path)
        grace_s, reason = said.get("grace_s", GRACE_S), said.get("reason", "")
        if not isinstance(grace_s, int | float) or isinstance(grace_s, bool) or not 0 <= grace_s <= LONGEST_GRACE_S:
            grace_s = GRACE_S
        age_s = time.time() - (_written(path) or 0) / 1e9
        self._reason = reason[:LONGEST_REASON] if isinstance(reason, str) and reason else UNTOLD
        self._since_s = lease.now_s() - (age_s if 0 <= age_s <= grace_s else 0.0)
        self._until_s = self._since_s + grace_s


def _follow(notices: "weakref.ref[NoticeWatcher]") -> None:
    while (it := notices()) is not None:
        try:
            it.look()
        except Exception:
            LOG.exception("notices were not looked at")
        del it
        time.sleep(LOOK_EVERY_S)


def _said(path: Path) -> dict[str, object]:
    """What cannot be read is a notice all the same."""
    try:
        found = parse_json(read_bytes(path, MOST_BYTES), str(path))
    except (OSError, UnreadableFile):
        return {}
    return found if isinstance(found, dict) else {}


def _written(path: Path) -> int | None:
    """When, in nanoseconds of the wall clock; None where there is no file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None

"""Watch for termination notices: files which announce that this node will stop.

A notice is in the node's folder, or at the path in POLYFLEET_NOTICE_FILE. The node's own main process writes one when
it receives a signal to end (cluster/host/termination_notice.py), and so may any program that expects the machine to
disappear: a cloud's agent, a batch system's epilogue. It contains JSON, {"reason": text, "grace_s": seconds}, with both
optional, or nothing. Removing the file withdraws the notice.
"""

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from cluster.host.termination_notice import FILE, GRACE_S
from cluster.input.untrusted_files import UnreadableFile, parse_json, read_bytes
from cluster.types import Notice
from workers.attempt.attempts import AttemptManager
from workers.protocol import lease

VARIABLE = "POLYFLEET_NOTICE_FILE"
NODE_DIR = "POLYFLEET_NODE_DIR"
POLL_EVERY_S = 0.25
CONTROLLER_TIME_S = 2.0
"""Time for the controller to make attempts save, at most a quarter of the grace time. Then the agent does so."""
MAX_GRACE_S = 7 * 86_400.0
MAX_NOTICE_BYTES = 4096
MAX_REASON_LENGTH = 200
LOG = logging.getLogger(__name__)
DEFAULT_REASON = "its machine got a termination notice"


def notice_paths(node_dir: Path, environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Return the paths of notices.

    An agent of another fleet than the node's own checks the node's folder, too.
    """
    in_node_dir = [Path(environ[NODE_DIR]) / FILE] if environ.get(NODE_DIR) else []
    from_variable = [Path(environ[VARIABLE])] if environ.get(VARIABLE) else []
    return tuple(dict.fromkeys((node_dir / FILE, *in_node_dir, *from_variable)))


class NoticeWatcher:
    """Watches the notices of one node; requests attempts to save if the controller does not do so in time.

    `on_change` is called when a notice appears, changes or is withdrawn.
    """

    def __init__(self, paths: Iterable[Path], attempts: AttemptManager, on_change: Callable[[], None]):
        self._paths = tuple(paths)
        self._attempts = attempts
        self._on_change = on_change
        self._current: tuple[Path, int] | None = None
        self._reason, self._since_s, self._until_s = "", 0.0, 0.0

    def start(self) -> None:
        """Start a thread that polls for as long as this object exists."""
        threading.Thread(target=_poll_loop, args=(weakref.ref(self),), name="notices", daemon=True).start()

    @property
    def active_notice(self) -> Notice | None:
        if self._current is None:
            return None
        return Notice(self._reason, round(max(0.0, self._until_s - lease.now_s()), 1))

    def poll(self) -> None:
        newest = next(((path, at) for path in self._paths if (at := _written_ns(path)) is not None), None)
        if newest != self._current:
            self._current = newest
            if newest is not None:
                self._read(newest[0])
            self._on_change()
        if self._current is not None and lease.now_s() >= self._since_s + self._controller_time_s():
            for attempt in self._attempts.live_attempts():
                self._attempts.stop(attempt.id.job, attempt.id.epoch, "preempt")

    def _controller_time_s(self) -> float:
        return min(CONTROLLER_TIME_S, (self._until_s - self._since_s) / 4)

    def _read(self, path: Path) -> None:
        """Read a notice.

        Its time counts from the file's, if that is plausible, so that a restart does not extend it.
        """
        fields = _read_fields(path)
        grace_s, reason = fields.get("grace_s", GRACE_S), fields.get("reason", "")
        if not isinstance(grace_s, int | float) or isinstance(grace_s, bool) or not 0 <= grace_s <= MAX_GRACE_S:
            grace_s = GRACE_S
        age_s = time.time() - (_written_ns(path) or 0) / 1e9
        self._reason = reason[:MAX_REASON_LENGTH] if isinstance(reason, str) and reason else DEFAULT_REASON
        self._since_s = lease.now_s() - (age_s if 0 <= age_s <= grace_s else 0.0)
        self._until_s = self._since_s + grace_s


def _poll_loop(get_watcher: "weakref.ref[NoticeWatcher]") -> None:
    while (watcher := get_watcher()) is not None:
        try:
            watcher.poll()
        except Exception:
            LOG.exception("termination notices could not be checked")
        del watcher
        time.sleep(POLL_EVERY_S)


def _read_fields(path: Path) -> dict[str, object]:
    """Return a notice's fields; {} if they cannot be read: the file is a notice nevertheless."""
    try:
        fields = parse_json(read_bytes(path, MAX_NOTICE_BYTES), str(path))
    except (OSError, UnreadableFile):
        return {}
    return fields if isinstance(fields, dict) else {}


def _written_ns(path: Path) -> int | None:
    """Return when a notice was written, in nanoseconds of the wall clock; None if there is no file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None

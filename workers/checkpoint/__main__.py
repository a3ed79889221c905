"""Run one checkpoint tool (see tools.py): a request on stdin, JSON lines on stdout."""

import json
import os
import sys
import threading
import time
from typing import Any

from cluster.errors import PolyfleetError
from workers.checkpoint.format import links
from workers.checkpoint.tools import PROGRESS_INTERVAL_S, apply_sandbox, limit_error, run

NETWORK_NOT_ISOLATED = "this system cannot cut off the network of a process; code in the file is never run in any case"


def main() -> int:
    request = json.loads(sys.stdin.readline())
    if request.get("follow_links") is True:
        links.follow()
    offline = apply_sandbox(request["verb"], request["arguments"])
    threading.Thread(target=_exit_with_caller, daemon=True).start()
    try:
        result = run(request["verb"], request["arguments"], _ProgressWriter())
        if not offline and request["verb"] == "import":
            result["notes"].append(NETWORK_NOT_ISOLATED)
    except (MemoryError, RecursionError):
        _write_line({"error": limit_error(request["verb"])})
        return 1
    except PolyfleetError as e:
        _write_line({"error": {"kind": type(e).__name__, "arguments": list(e.args), "message": str(e)}})
        return e.exit_code
    _write_line({"result": result})
    return 0


class _ProgressWriter:
    """Write progress lines, at most one per PROGRESS_INTERVAL_S."""

    def __init__(self) -> None:
        self._last_s = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self._last_s >= PROGRESS_INTERVAL_S:
            self._last_s = now
            _write_line({"progress": [done, total]})


def _write_line(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _exit_with_caller() -> None:
    """Exit when stdin ends: the caller keeps it open for as long as it waits for the result."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())

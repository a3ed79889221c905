"""Run one checkpoint tool (see tools.py): a request on stdin, JSON lines on stdout."""

import json
import os
import sys
import threading
import time
from typing import Any

from cluster.errors import PolyfleetError
from workers.checkpoint.format import links
from workers.checkpoint.tools import EVERY_S, apply_sandbox, exceeds_limits, run

ONLINE = "this system cannot cut off the network of a process; code in the file is never run in any case"


def main() -> int:
    request = json.loads(sys.stdin.readline())
    if request.get("follow_links") is True:
        links.follow()
    offline = apply_sandbox(request["verb"], request["arguments"])
    threading.Thread(target=_end_with_reader, daemon=True).start()
    try:
        result = run(request["verb"], request["arguments"], _Teller())
        if not offline and request["verb"] == "import":
            result["notes"].append(ONLINE)
    except (MemoryError, RecursionError):
        _tell({"error": exceeds_limits(request["verb"])})
        return 1
    except PolyfleetError as e:
        _tell({"error": {"kind": type(e).__name__, "arguments": list(e.args), "message": str(e)}})
        return e.exit_code
    _tell({"result": result})
    return 0


class _Teller:
    """Write progress lines, at most one every EVERY_S."""

    def __init__(self) -> None:
        self._last_s = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self._last_s >= EVERY_S:
            self._last_s = now
            _tell({"progress": [done, total]})


def _tell(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _end_with_reader() -> None:
    """Exit when stdin ends: the caller keeps it open for as long as it waits for the result."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())

"""The server's log: times in UTC, and rate-limited messages of errors that other processes can cause."""

import logging
import time

INTERVAL_S = 10.0
MAX_KINDS = 100
LIMITED_LOGGERS = ("asyncio", "uvicorn.error")
"""Loggers whose messages any process that can connect may cause, as often as it wants."""


class RateLimitFilter(logging.Filter):
    """Passes the first message of a kind, then one each INTERVAL_S, which contains the number of suppressed ones."""

    def __init__(self) -> None:
        super().__init__()
        self._last_by_kind: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        error = repr(record.exc_info[1])[:200] if record.exc_info else ""
        kind, now = str(record.msg).partition("\n")[0] + error, time.monotonic()
        last, left_out = self._last_by_kind.get(kind, (-INTERVAL_S, 0))
        if now - last < INTERVAL_S:
            self._last_by_kind[kind] = (last, left_out + 1)
            return False
        if len(self._last_by_kind) > MAX_KINDS:
            self._last_by_kind.clear()
        self._last_by_kind[kind] = (now, 0)
        if left_out:
            record.msg = f"{record.msg} (and {left_out} more since the last one)"
        return True


def log_to_stderr() -> None:
    """Log to stderr, which daemon.py redirects to logs/server.log."""
    logging.Formatter.converter = time.gmtime
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)sZ %(levelname)s %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
    )
    for name in LIMITED_LOGGERS:
        logging.getLogger(name).addFilter(RateLimitFilter())

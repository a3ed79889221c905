"""Deadlines of jobs: a time with its time zone, or a duration after the submission."""

from datetime import UTC, datetime

from cluster.errors import SpecError, UserError
from orchestrator.spec.resource_syntax import duration_s

MAX_DEADLINE_S = 10 * 365 * 86400.0
FORMS = "write a time with its zone, e.g. 2026-12-01T18:00:00Z, or a duration from the submission on, e.g. 6h"


def deadline_error(written: object) -> str:
    """ "" or the reason why `written` can never be a valid deadline."""
    if (after_s := _after_s(written)) is not None:
        return "" if 0 < after_s <= MAX_DEADLINE_S else f"{written} is not between now and in 10 years"
    if (moment := _moment(written)) is None:
        return f"{str(written)[:80]!r} is neither a time nor a duration"
    return "" if moment.tzinfo else f"{written} has no time zone"


def wall_s(written: object, submitted_s: float) -> float:
    """The deadline as Unix time in seconds. Raises SpecError if it is in the past when the job is submitted."""
    after_s, moment = _after_s(written), _moment(written)
    if after_s is not None:
        return submitted_s + after_s
    assert moment is not None  # the caller has called `deadline_error`
    if moment.timestamp() <= submitted_s:
        now = datetime.fromtimestamp(submitted_s, UTC).isoformat(timespec="seconds")
        raise SpecError("deadline", f"{written} is in the past; it is {now} now", FORMS)
    return moment.timestamp()


def _after_s(written: object) -> float | None:
    try:
        return duration_s(written)
    except UserError:
        return None


def _moment(written: object) -> datetime | None:
    try:
        return datetime.fromisoformat(written) if isinstance(written, str) else None
    except ValueError:
        return None

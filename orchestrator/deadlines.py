"""When a job has to be done: a time with its zone, or so long after the job is submitted."""

from datetime import UTC, datetime

from cluster.errors import SpecError, UserError
from orchestrator.resource_syntax import duration_s

LONGEST_S = 10 * 365 * 86400.0
FORMS = "write a time with its zone, e.g. 2026-12-01T18:00:00Z, or a duration from the submission on, e.g. 6h"


def refusal(written: object) -> str:
    """ "" or why this is no deadline at any time."""
    if (after_s := _after_s(written)) is not None:
        return "" if 0 < after_s <= LONGEST_S else f"{written} is not between now and in 10 years"
    if (moment := _moment(written)) is None:
        return f"{str(written)[:80]!r} is neither a time nor a duration"
    return "" if moment.tzinfo else f"{written} has no time zone"


def wall_s(written: object, submitted_s: float) -> float:
    """Seconds of the wall clock. Raises SpecError where that is over when the job is submitted."""
    after_s, moment = _after_s(written), _moment(written)
    if after_s is not None:
        return submitted_s + after_s
    assert moment is not None  # `refusal` has been asked
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

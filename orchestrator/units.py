"""Format numbers with units for people. JSON output has plain numbers, and times in ISO 8601."""

from datetime import UTC, datetime

SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: int | None) -> str:
    if count is None:
        return ""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(SIZES) - 1:
        value, unit = value / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{value:.1f} {SIZES[unit]}"


def duration(seconds: float | None) -> str:
    """Format with three digits in µs, ms or s; from two minutes on in minutes and hours."""
    if seconds is None:
        return ""
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1, 1e3, "ms"), (120, 1, "s")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def timestamp(iso: str | None) -> datetime | None:
    return datetime.fromisoformat(iso).astimezone(UTC) if iso else None


def iso(wall_s: float | None) -> str | None:
    """ISO 8601 in UTC, to the millisecond, of seconds since 1970.

    None for a time that is not set, or is out of range: files and users' code may contain any number.
    """
    try:
        return datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="milliseconds") if wall_s else None
    except (ValueError, OverflowError, OSError):
        return None


def when(iso: str | None) -> str:
    """Format a time to the second, in UTC; "" without a time."""
    return f"{moment:%Y-%m-%d %H:%M:%S}" if (moment := timestamp(iso)) else ""


def time_since(iso: str | None, now: datetime | None = None) -> str:
    """Format how long ago, in one unit; "" without a time."""
    then = timestamp(iso)
    if then is None:
        return ""
    seconds = int(((now or datetime.now(UTC)) - then).total_seconds())
    if seconds <= 0:
        return "just now"
    for limit, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds // unit_s} {unit} ago"
    return f"{seconds // 86_400} days ago"


def elapsed(start: str | None, end: str | None, now: datetime | None = None) -> str:
    """Format the time from `start` to `end`, or to now; "" if negative because a clock was set back."""
    if (first := timestamp(start)) is None:
        return ""
    seconds = ((timestamp(end) or now or datetime.now(UTC)) - first).total_seconds()
    return duration(seconds) if seconds >= 0 else ""

"""Numbers as people read them."""

from datetime import UTC, datetime

import pytest

from orchestrator.units import duration, elapsed, iso, size, time_since, when

NOW = datetime(2026, 11, 20, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, ""), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (80 << 30, "80.0 GiB"), (5 << 50, "5120.0 TiB")],
)
def test_sizes(count, text):
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (0, "0 µs"),
        (0.0000123, "12.3 µs"),
        (0.0123, "12.3 ms"),
        (1.5, "1.5 s"),
        (119, "119 s"),
        (125, "2 min 5 s"),
        (7260, "2 h 1 min"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_times_are_told_from_now():
    assert time_since("2026-11-20T11:59:30.900+00:00", NOW) == "29 s ago"
    assert time_since("2026-11-20T11:59:59.600Z", NOW) == "just now"
    assert time_since("2026-11-20T12:00:01Z", NOW) == "just now"
    assert time_since("2026-11-20T11:57:01Z", NOW) == "2 min ago"
    assert time_since("2026-11-20T05:00:00Z", NOW) == "7 h ago"
    assert time_since("2026-11-17T05:00:00Z", NOW) == "3 days ago"
    assert time_since(None, NOW) == ""
    assert elapsed("2026-11-20T11:00:00Z", None, NOW) == "60 min 0 s"
    assert elapsed("2026-11-20T11:00:00Z", "2026-11-20T11:00:10Z", NOW) == "10 s"
    assert elapsed(None, None, NOW) == ""
    assert elapsed("2026-11-20T12:00:00Z", "2026-11-20T11:00:10Z", NOW) == "", "the clock was set back meanwhile"


def test_times_are_iso_and_what_is_no_time_is_none():
    assert iso(1.5) == "1970-01-01T00:00:01.500+00:00"
    assert [iso(no_time) for no_time in (None, 0.0, 1e300, -1e300)] == [None] * 4
    assert when(iso(90.0)) == "1970-01-01 00:01:30" and when(None) == ""

"""Write durations in text."""


def duration_text(seconds: float) -> str:
    """Return a duration with its unit: `40 s`, `12 min`, `3.5 h`, `2 days`."""
    for limit_s, unit_s, unit in ((120.0, 1.0, "s"), (7200.0, 60.0, "min"), (172_800.0, 3600.0, "h")):
        if seconds < limit_s:
            return f"{seconds / unit_s:.3g} {unit}"
    return f"{seconds / 86_400:.3g} days"

"""Time limits in seconds that depend on each other.

tests/orchestrator/core/test_timing.py checks the conditions between them and those of workers/ and runtime/.
"""

NODE_SILENT_S = 6.5
"""Seconds after an agent's last reply from which its node gets no new jobs and its attempts are fenced off.

An agent replies to a poll within two seconds. A node that restarts has often returned by then, and its attempts
continue. Together with the lease that follows, an attempt is replaced within 20 s.
"""

AGENT_HUNG_S = 5.0
"""Seconds without a reply after which an agent is restarted.

On the server's machine the new one responds within three seconds, before the leases of its attempts expire.
"""

AGENT_FIRST_REPLY_S = 60.0
"""Limit for an agent's first reply, which may wait for vendors' tools and the start of the process."""

AGENT_RESTART_WINDOW_S = 600.0
"""Seconds after an agent's last restart in which its restarts count as recent. Longer than any pause between two."""

QUICK_AGENT_RESTARTS = 3
"""Number of recent restarts above which AGENT_HUNG_S doubles with each. AGENT_FIRST_REPLY_S doubles above one."""

AGENT_RESTART_S = 15.0
"""Seconds after a restart in which the end of an agent does not count as a failure of its node."""

REJOIN_GRACE_S = 15.0
"""Time for Ray's nodes to reconnect to a restarted head: usually seconds, more on a busy machine."""

CLOCK_GAP_S = 2.0
"""Seconds between two ticks above which this process was stopped in between, or the machine slept."""

MIN_LEASE_S = 5.0
"""Shortest lease that an agent can renew in time while the server is down.

It reads the fence once a second from a third of the lease on, and Ray's store may take another third to reply, three
seconds for an agent that starts.
"""

LEASE_MARGIN_S = 2.0
"""Seconds after a lease has expired until the controller considers a part as ended.

By then its supervisor has killed its ranks, or its agent has killed a supervisor that did not.
"""

PATIENT_LEASE_S = 86_400.0
"""Lease of a job that waits for a disconnected node (`on_disconnect: wait`): the longest that an order may have."""

CANCELLED_LEASE_S = 30.0
"""Longest lease of a cancelled job: it has no next attempt that could run at the same time."""

CUT_OFF_AFTERMATH_S = 60.0
"""Seconds after its nodes respond again in which an attempt may still fail because of broken connections."""

CONTACT_AFTER_FAILURE_S = 3.0
"""A node that responds this many seconds after another part failed did not cause that failure."""

LAUNCH_SLOW_S = 10.0
"""A launch that takes longer is mentioned in the waiting reason of its job."""

FENCE_RETRY_S = 3.0
"""Seconds without a reply after which a request to read, raise or lower a fence is repeated."""

STOP_RETRY_S = 5.0
"""Seconds without a reply after which a stop request, or the release of a reservation, is repeated."""

STOP_OVERDUE_S = 15.0
"""Seconds after an acknowledged stop, in addition to the grace, after which it is repeated."""

UNTRACKED_RETRY_S = 2.0
"""Seconds before a request to a node to stop or remove an untracked attempt is repeated."""

RELEASE_LATE_S = 10.0
"""Seconds within which a normal end frees all devices."""

STUCK_CERTAIN_S = 30.0
"""Seconds from the first failed launch to the last after which the cause is a stuck reservation, not a slow Ray."""

STUCK_EXPIRES_S = 180.0
"""Seconds between failed launches above which they are unrelated; a job is retried after about a minute at most."""


def duration_text(seconds: float) -> str:
    """Return a duration with its unit: `40 s`, `12 min`, `3.5 h`, `2 days`."""
    for limit_s, unit_s, unit in ((120.0, 1.0, "s"), (7200.0, 60.0, "min"), (172_800.0, 3600.0, "h")):
        if seconds < limit_s:
            return f"{seconds / unit_s:.3g} {unit}"
    return f"{seconds / 86_400:.3g} days"

"""Time limits in seconds that depend on each other.

tests/orchestrator/core/test_timing.py checks the conditions between them and those of workers/ and runtime/.
"""

NODE_SILENT_S = 6.5
"""Seconds after an agent's last reply from which its node gets no new jobs and its attempts are fenced off.

An agent replies to a poll within two seconds. A node that restarts has often returned by then, and its attempts
continue. Together with the lease that follows, an attempt is replaced within 20 s.
"""

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

STUCK_EXPIRES_S = 180.0
"""Seconds between failed launches above which they are unrelated; a job is retried after about a minute at most."""

FENCE_RETRY_S = 3.0
"""Seconds without a reply after which a request to read, raise or lower a fence is repeated."""

STOP_RETRY_S = 5.0
"""Seconds without a reply after which a stop request, or the release of a reservation, is repeated."""

STOP_OVERDUE_S = 15.0
"""Seconds after an acknowledged stop, in addition to the grace, after which it is repeated."""

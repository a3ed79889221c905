"""Limits of time that belong together, in seconds. tests/orchestrator/core/test_timing.py holds what must be true
between them, those of agents (workers/) and of the controller's threads (runtime/) included.
"""

NODE_SILENT_S = 6.5
"""An agent answers within its watch of two seconds. So long after its last answer a node gets no new work, and its
attempts are fenced off. A node that ended is often back by then, and its attempts go on. With the lease that follows,
an attempt is placed anew within 20 s.
"""

MIN_LEASE_S = 5.0
"""The shortest lease that an agent can renew in time while the server is silent: it reads the fence once a second from
a third of the lease on, and Ray's store may take another third to answer; for a start, three seconds.
"""

LEASE_MARGIN_S = 2.0
"""Past a lease, until the controller takes a part for ended: by then its supervisor has killed its ranks, or its agent
has killed a supervisor that did not.
"""

"""What must be true between limits of time that lie in several places: each is right only beside the others."""

import pytest

from orchestrator.core import timing
from orchestrator.core.attempt import suspicion
from orchestrator.core.controller import nodes
from orchestrator.core.fleet import membership
from orchestrator.core.jobs import retry
from orchestrator.runtime.agents import fences
from orchestrator.runtime.controller import controller, step_batch
from orchestrator.runtime.health import health
from workers.attempt import attempt
from workers.attempt.supervision import supervisor, supervisor_handle
from workers.node import agent
from workers.protocol import fence, messages
from workers.protocol.messages import LEASE_S

BUSY_S = 0.5
"""So late threads of a node may be that has more to do than it can."""


def test_a_node_whose_attempts_are_fenced_off_gets_no_new_work(c, w):
    c.node("a", count=2)
    c.run(w.job("j", w.want("cpu")))
    _, commands = c.tick(timing.NODE_SILENT_S + 0.1)
    assert [x.epoch for x in commands if hasattr(x, "lower")] == [2]
    assert nodes.closed_reason(c.control.nodes["a"], {}, c.s) == "node a has not answered for 7 s"
    c.submit(w.job("next", w.want("cpu")))
    assert c.tick(0.5)[0] == []


def test_one_limit_says_that_a_node_is_silent():
    assert nodes.NODE_SILENT_S == suspicion.NODE_SILENT_S == health.NODE_SILENT_S == timing.NODE_SILENT_S


def test_an_agent_that_hangs_is_started_again_before_its_node_counts_as_silent():
    assert controller.POLL_S + 1.0 < timing.AGENT_HUNG_S < timing.NODE_SILENT_S
    assert timing.AGENT_HUNG_S + 3.0 < LEASE_S, "the next one renews the leases in time"


def test_restarts_with_the_longest_pause_between_them_still_count():
    assert 2 * membership.MAX_RETRY_S <= timing.AGENT_RESTART_WINDOW_S


def test_the_end_of_an_agent_that_is_started_again_is_no_failure_of_its_node():
    """It is restarted, hangs again, and is restarted once more."""
    assert 2 * timing.AGENT_HUNG_S < timing.AGENT_RESTART_S


def test_a_server_that_is_busy_is_not_taken_for_one_that_was_stopped():
    assert 2 * step_batch.CYCLE_S < timing.CLOCK_GAP_S


def test_a_fence_is_requested_again_before_the_first_request_is_given_up():
    """So that a newer change waits for its turn when the head replies, and is made at once."""
    assert timing.FENCE_RETRY_S < fences.LIMIT_S


def test_the_longest_lease_of_a_job_is_the_longest_that_an_order_may_have():
    assert timing.PATIENT_LEASE_S == messages.MAX_LEASE_S
    assert LEASE_S < timing.CANCELLED_LEASE_S < timing.PATIENT_LEASE_S


def test_a_reservation_is_released_again_before_it_counts_as_late_and_is_stuck_only_long_after():
    assert timing.STOP_RETRY_S < timing.RELEASE_LATE_S < timing.STUCK_CERTAIN_S < timing.STUCK_EXPIRES_S
    assert 2 * retry.MAX_BACKOFF_S < timing.STUCK_EXPIRES_S, "failed launches of one job belong together"


def test_the_ranks_have_had_their_grace_before_a_stop_that_was_acknowledged_is_repeated():
    assert timing.STOP_RETRY_S < timing.STOP_OVERDUE_S
    assert supervisor_handle.CANCEL_GRACE_S < timing.STOP_OVERDUE_S


def test_a_lost_node_is_replaced_within_twenty_seconds():
    assert timing.NODE_SILENT_S + LEASE_S + timing.LEASE_MARGIN_S + 2 * step_batch.CYCLE_S <= 20.0


def test_an_agent_has_killed_a_supervisor_that_was_stopped_before_its_part_counts_as_ended():
    looks_s = attempt.CHECK_SUPERVISOR_EVERY_S + 0.5  # what it then has to do
    assert supervisor_handle.LEASE_MARGIN_S + looks_s < timing.LEASE_MARGIN_S


def test_a_supervisor_looks_at_its_lease_before_its_agent_kills_it():
    assert supervisor.CHECK_EVERY_S < supervisor_handle.LEASE_MARGIN_S


@pytest.mark.parametrize("lease_s", [timing.MIN_LEASE_S, LEASE_S])
def test_a_fence_is_read_in_time_to_renew_a_lease_while_the_server_is_silent(lease_s):
    """Also on a busy node, and again for the next renewal, which follows the one before by a look and an answer."""
    silent_s, answer_s = lease_s * agent.SILENT_SHARE_OF_LEASE, lease_s * fence.SHARE_OF_LEASE
    assert silent_s + agent.FENCE_EVERY_S + answer_s + BUSY_S < lease_s
    assert answer_s + agent.FENCE_EVERY_S + answer_s + BUSY_S < lease_s


def test_an_attempt_of_the_shortest_lease_is_started_and_renewed_before_that_ends():
    """It counts from when the fence was asked for."""
    assert fence.STORE_TIMEOUT_S + 2 * BUSY_S < timing.MIN_LEASE_S


def test_a_shorter_lease_could_not_be_renewed_in_time():
    shorter_s = timing.MIN_LEASE_S - 1.0
    slow_s = shorter_s * (agent.SILENT_SHARE_OF_LEASE + fence.SHARE_OF_LEASE)
    assert slow_s + agent.FENCE_EVERY_S + BUSY_S > shorter_s

"""Track which nodes exist, whether their agents respond, and which nodes take no new jobs. Pure."""

from dataclasses import replace

from orchestrator.core.attempt import attempt_stops
from orchestrator.core.attempt.transitions import void_stops
from orchestrator.core.controller import nodes
from orchestrator.core.controller.commands import EndIdleAgent, RestartAgent, StartAgent, UnwatchAgent
from orchestrator.core.controller.draft import Draft
from orchestrator.core.controller.messages import (
    AgentDied,
    AgentFailed,
    AgentStarted,
    ClusterJoined,
    ClusterLeft,
    ListedNode,
    NodesListed,
)
from orchestrator.core.controller.nodes import Node
from orchestrator.core.timing import (
    AGENT_FIRST_REPLY_S,
    AGENT_HUNG_S,
    AGENT_RESTART_S,
    AGENT_RESTART_WINDOW_S,
    QUICK_AGENT_RESTARTS,
    REJOIN_GRACE_S,
)

AGENT_RETRY_S = 1.0
"""Seconds between the first tries to start an agent; they double after QUICK_TRIES."""
QUICK_TRIES = 3
MAX_RETRY_S = 300.0
"""Longest pause between tries to start or restart an agent: a repaired node waits no longer than this."""

END_AGENT_RETRY_S = 60.0
"""Seconds after which ending the agent is repeated: one that still runs prevents the node's removal."""

LOST_NODE_LISTED_S = 3600.0
"""Seconds that a lost node without attempts stays listed."""


def cluster_joined(draft: Draft, message: ClusterJoined) -> None:
    """Handle the join of the cluster. From now on nodes have one lease to list what runs there.

    After a lost head they also get time to reconnect to it. Lost nodes can return only from now on. For fences see
    suspicion.rejoined.
    """
    since_s = draft.now.s + (REJOIN_GRACE_S if draft.nodes.current else 0.0)
    draft.change(is_joined=True, joined_s=draft.now.s, needs_plan=True)
    for node in draft.nodes.values():
        draft.nodes[node.name] = replace(node, lost_s=since_s)
    for attempt in draft.attempts.values():
        draft.attempts[attempt.job] = replace(attempt, since_s=since_s)
        void_stops(draft, attempt)


def cluster_left(draft: Draft, message: ClusterLeft) -> None:
    draft.change(is_joined=False, needs_plan=True)
    for name, node in draft.nodes.items():
        if message.has_ended:
            draft.nodes.pop(name)
        else:
            draft.nodes[name] = replace(node, has_agent=False, agent_requested_s=None)


def nodes_listed(draft: Draft, message: NodesListed) -> None:
    """Update nodes from Ray's list: new nodes get an agent, missing ones are lost.

    If two live nodes have the same name, the first keeps it. The second may be the same machine, restarted before Ray
    noticed its end; its name gets a suffix from its Ray id, and it takes no jobs until the first has gone. Then it gets
    the name.
    """
    alive = {row.ray_id: row for row in message.nodes}
    names = {node.ray_id: node.name for node in draft.nodes.values()}
    for node in draft.nodes.values():
        if node.ray_id not in alive and not node.lost_reason:
            _mark_lost(draft, node)
    for row in sorted(message.nodes, key=lambda r: r.ray_id):
        name = _free_name(draft, row, alive)
        second = None
        if (previous_name := names.get(row.ray_id, name)) != name:
            second = draft.nodes[previous_name]
            draft.nodes.pop(previous_name)
            draft.command(UnwatchAgent(previous_name, row.ray_id))
        existing = draft.nodes.get(name)
        if existing is None or existing.ray_id != row.ray_id:
            _add_node(draft, name, row, second)
        elif existing.lost_reason:
            draft.nodes[name] = replace(existing, lost_reason="")
        _apply_ray_notice(draft, name, row)


def _free_name(draft: Draft, row: ListedNode, alive: dict[str, ListedNode]) -> str:
    holder = draft.nodes.get(row.name)
    free = holder is None or holder.ray_id == row.ray_id or holder.ray_id not in alive
    return row.name if free else f"{row.name}-{row.ray_id[:6]}"


def _add_node(draft: Draft, name: str, row: ListedNode, second: Node | None = None) -> None:
    """Add a node. `second` is its previous state under a second name.

    Until it lists what runs there, its previous lists and contact times count.
    """
    previous = [node for node in (draft.nodes.get(name), second) if node]
    attempts = [draft.attempts[job] for job in draft.on_node(name)]
    tracked = {
        attempt.part_key(rank) for attempt in attempts for rank, part in enumerate(attempt.parts) if part.node == name
    }
    draft.nodes[name] = Node(
        name,
        row.ray_id,
        max((node.last_contact_s for node in previous), default=draft.now.s),
        failures=previous[0].failures if previous else (),
        in_failure=previous[0].in_failure if previous else False,
        quarantined_until_s=previous[0].quarantined_until_s if previous else 0.0,
        duplicate_of="" if name == row.name else row.name,
        untracked={key: s for node in previous for key, s in node.untracked.items() if key not in tracked},
        cpus=row.cpus,
        pool=row.pool,
    )
    draft.change(needs_plan=True)
    _start_agent(draft, name)


def _mark_lost(draft: Draft, node: Node) -> None:
    """Handle a node that Ray no longer lists. The autoscaler has removed it if it was resting."""
    draft.command(UnwatchAgent(node.name, node.ray_id))
    draft.change(needs_plan=True)
    if node.resting and not draft.on_node(node.name):
        draft.nodes.pop(node.name)
        return
    updated = (
        node
        if node.is_restarting(draft.now.s)
        else nodes.record_failure(node, "Ray reported the node dead", draft.now.s)
    )
    draft.nodes[node.name] = replace(
        updated,
        lost_reason="Ray marked the node dead",
        lost_s=draft.now.s,
        has_agent=False,
        agent_requested_s=None,
        resting_s=None,
    )


def _apply_ray_notice(draft: Draft, name: str, row: ListedNode) -> None:
    node = draft.nodes[name]
    notice = f"Ray drains it ({row.draining_s:.0f} s were left)" if row.draining_s is not None else ""
    if bool(notice) != bool(node.ray_drain_reason):
        draft.nodes[name] = replace(node, ray_drain_reason=notice)
        attempt_stops.notice_changed(draft, name, node.notice)


def review(draft: Draft) -> None:
    """Start missing agents, restart hung ones, and drop nodes that left long ago. Called once per tick."""
    for name, node in draft.nodes.items():
        if node.lost_reason:
            if node.silent_s(draft.now.s) > LOST_NODE_LISTED_S and not draft.on_node(name):
                draft.nodes.pop(name)
        elif node.resting_s is not None:
            if draft.now.s - node.resting_s > END_AGENT_RETRY_S:
                end_agent(draft, name)
        elif not node.has_agent:
            if node.agent_requested_s is None or draft.now.s - node.agent_requested_s > agent_retry_s(
                node.failed_agent_starts
            ):
                _start_agent(draft, name)
        else:
            _restart_hung_agent(draft, node)


def agent_retry_s(failures: int) -> float:
    """Return the pause before the next try to start an agent, after this number of failures in a row."""
    return _doubled(AGENT_RETRY_S, failures - QUICK_TRIES)


def _start_agent(draft: Draft, name: str) -> None:
    node = draft.nodes[name]
    draft.nodes[name] = replace(node, has_agent=False, agent_requested_s=draft.now.s)
    draft.command(StartAgent(name, node.ray_id))


def end_agent(draft: Draft, name: str) -> None:
    """End the agent of an unused node, since Ray's autoscaler never removes a node with an agent."""
    node = draft.nodes[name]
    draft.nodes[name] = replace(node, has_agent=False, agent_requested_s=None, resting_s=draft.now.s)
    draft.command(EndIdleAgent(name, node.ray_id))
    draft.change(needs_plan=True)


def wake(draft: Draft, name: str) -> None:
    """Start the agent of a resting node again. Its facts stay valid, but it must first list what runs there."""
    draft.nodes[name] = replace(draft.nodes[name], resting_s=None, list_requested_s=None, last_contact_s=draft.now.s)
    draft.change(needs_plan=True)
    _start_agent(draft, name)


def _restart_hung_agent(draft: Draft, node: Node) -> None:
    since_restart_s = draft.now.s - node.agent_restarted_s
    restarts = node.agent_restarts if since_restart_s < AGENT_RESTART_WINDOW_S else 0
    silent_s = min(node.silent_s(draft.now.s), since_restart_s)
    if silent_s > _silence_limit_s(node, restarts):
        why = f"the agent of {node.name} did not answer for {silent_s:.0f} s and was restarted"
        draft.nodes[node.name] = replace(node, agent_restarted_s=draft.now.s, agent_restarts=restarts + 1)
        draft.command(RestartAgent(node.name, node.ray_id, why))


def _silence_limit_s(node: Node, restarts: int) -> float:
    """Return how long the agent may be silent after this number of recent restarts.

    On a machine that is too busy for an agent to reply in time, each restart makes it busier.
    """
    is_starting = node.facts is None or node.agent_restarted_s > node.last_contact_s
    limit_s, quick = (AGENT_FIRST_REPLY_S, 1) if is_starting else (AGENT_HUNG_S, QUICK_AGENT_RESTARTS)
    return _doubled(limit_s, restarts - quick)


def _doubled(pause_s: float, times: int) -> float:
    return float(min(MAX_RETRY_S, pause_s * 2 ** min(max(0, times), 16)))


def agent_started(draft: Draft, message: AgentStarted) -> None:
    node = draft.nodes.get(message.node)
    if node is None or node.ray_id != message.ray_id or node.lost_reason or node.resting:
        return
    if message.error:
        _agent_not_started(draft, node, f"its agent could not be started: {message.error}")
    else:
        draft.nodes[message.node] = replace(node, has_agent=True, agent_requested_s=None, agent_restarted_s=draft.now.s)


def agent_died(draft: Draft, message: AgentDied) -> None:
    node = draft.nodes.get(message.node)
    if node is None or node.ray_id != message.ray_id or node.lost_reason or node.resting:
        return
    if draft.now.s - node.agent_restarted_s > AGENT_RESTART_S and not node.is_restarting(draft.now.s):
        draft.nodes[node.name] = nodes.record_failure(node, "its agent ended", draft.now.s)
    if message.is_permanent and message.why:
        _agent_not_started(draft, draft.nodes[node.name], message.why)
    elif message.is_permanent:
        _start_agent(draft, node.name)


def _agent_not_started(draft: Draft, node: Node, why: str) -> None:
    """Retry the start of an agent after a pause. The first failures stay hidden: Ray's head may be restarting."""
    tries = node.failed_agent_starts + 1
    reason = why if tries >= QUICK_TRIES else node.agent_error
    if tries == 1 or reason != node.agent_error:
        draft.warn(f"node {node.name}: {why}; the server retries")
    if reason != node.agent_error:
        draft.change(needs_plan=True)
    draft.nodes[node.name] = replace(
        node, has_agent=False, agent_requested_s=draft.now.s, failed_agent_starts=tries, agent_error=reason
    )


def agent_failed(draft: Draft, message: AgentFailed) -> None:
    """Handle an agent that cannot list its attempts. They count as running until their leases expire."""
    node = draft.nodes.get(message.node)
    if node is not None and node.ray_id == message.ray_id and node.agent_error != message.why and not node.resting:
        draft.nodes[node.name] = replace(node, agent_error=message.why)
        draft.warn(f"node {node.name}: {message.why}")
        draft.change(needs_plan=True)

"""Which nodes there are, whether their agents answer, and which take no new work. Pure."""

from dataclasses import replace

from orchestrator.core import attempt_stops, nodes
from orchestrator.core.commands import DropAgent, MakeAgent, RestAgent, RestartAgent
from orchestrator.core.draft import Draft
from orchestrator.core.messages import (
    AgentDied,
    AgentFailed,
    AgentMade,
    Joined,
    NodeSeen,
    NodesSeen,
    Parted,
)
from orchestrator.core.nodes import Node

MADE_AGAIN_S = 1.0
"""Between two tries to make an agent, a few times; then longer and longer."""
QUICK_TRIES = 3
LONGEST_AGAIN_S = 300.0
"""Whoever repairs such a node waits no longer than this for its agent."""

HUNG_S = 5.0
"""An agent that has not answered for so long is ended and started again. The next one is there within three seconds on
the server's machine, before the attempts have lost their leases: they do not notice.
"""

ENDED_BY_US_S = 15.0
"""So long after that the end of an agent is no failure of its node."""

HELLO_HUNG_S = 60.0
"""A first greeting may wait for tools of vendors, and for the process to start."""

HEAD_REGAINED_S = 15.0
"""Ray's nodes are back at a head that was started again within seconds, on a busy machine later."""

REST_AGAIN_S = 60.0
"""An agent that could not be ended, or was just being made, keeps its node from being given back."""

FORGOTTEN_S = 3600.0
"""So long a lost node without attempts is still told of."""


def joined(draft: Draft, told: Joined) -> None:
    """Nodes have a whole lease, from now on, to tell what runs there, after a lost head beside the time they take to
    find it again. Lost nodes can come back only from now on. For fences see fencing.rejoined.
    """
    since_s = draft.now.s + (HEAD_REGAINED_S if draft.nodes.now else 0.0)
    draft.change(joined=True, joined_s=draft.now.s, changed=True)
    for node in draft.nodes.values():
        draft.nodes[node.name] = replace(node, lost_s=since_s)
    for live in draft.lives.values():
        draft.lives[live.job] = replace(live, since_s=since_s, asked={})


def parted(draft: Draft, told: Parted) -> None:
    draft.change(joined=False, changed=True)
    for name, node in draft.nodes.items():
        if told.over:
            draft.nodes.pop(name)
        else:
            draft.nodes[name] = replace(node, has_agent=False, making_s=None)


def seen(draft: Draft, told: NodesSeen) -> None:
    """Compare with Ray's list: new nodes get an agent, those gone are lost. A name that two living nodes bear belongs
    to the one that had it. The other may be the same machine, started again before Ray has missed it: it is told apart
    by its Ray id, and takes no work, until the first has gone. Then the name is its own.
    """
    alive = {row.ray_id: row for row in told.nodes}
    held = {node.ray_id: node.name for node in draft.nodes.values()}
    for node in draft.nodes.values():
        if node.ray_id not in alive and not node.lost:
            _lost(draft, node)
    for row in sorted(told.nodes, key=lambda r: r.ray_id):
        name = _free_name(draft, row, alive)
        second = None
        if (had := held.get(row.ray_id, name)) != name:
            second = draft.nodes[had]
            draft.nodes.pop(had)
            draft.command(DropAgent(had, row.ray_id))
        known = draft.nodes.get(name)
        if known is None or known.ray_id != row.ray_id:
            _appeared(draft, name, row, second)
        elif known.lost:
            draft.nodes[name] = replace(known, lost="")
        _noticed(draft, name, row)


def _free_name(draft: Draft, row: NodeSeen, alive: dict[str, NodeSeen]) -> str:
    holder = draft.nodes.get(row.name)
    free = holder is None or holder.ray_id == row.ray_id or holder.ray_id not in alive
    return row.name if free else f"{row.name}-{row.ray_id[:6]}"


def _appeared(draft: Draft, name: str, row: NodeSeen, second: Node | None = None) -> None:
    """`second` is what we knew of it under a second name. Until it tells what runs there, that is what it told before,
    and its attempts are as silent as they were.
    """
    before = [node for node in (draft.nodes.get(name), second) if node]
    lives = [draft.lives[job] for job in draft.on_node(name)]
    mine = {live.part_key(rank) for live in lives for rank, part in enumerate(live.parts) if part.node == name}
    draft.nodes[name] = Node(
        name,
        row.ray_id,
        max((node.heard_s for node in before), default=draft.now.s),
        failures=before[0].failures if before else (),
        failing=before[0].failing if before else False,
        quarantined_until_s=before[0].quarantined_until_s if before else 0.0,
        same_as="" if name == row.name else row.name,
        strangers={key: s for node in before for key, s in node.strangers.items() if key not in mine},
        cpus=row.cpus,
        pool=row.pool,
    )
    draft.change(changed=True)
    _make(draft, name)


def _lost(draft: Draft, node: Node) -> None:
    """One that rested was given back."""
    draft.command(DropAgent(node.name, node.ray_id))
    draft.change(changed=True)
    if node.resting and not draft.on_node(node.name):
        draft.nodes.pop(node.name)
        return
    gone = node if node.restarts(draft.now.s) else nodes.failed(node, "Ray reported it dead", draft.now.s)
    draft.nodes[node.name] = replace(
        gone, lost="Ray reports the node dead", lost_s=draft.now.s, has_agent=False, making_s=None, resting_s=None
    )


def _noticed(draft: Draft, name: str, row: NodeSeen) -> None:
    node = draft.nodes[name]
    told = f"Ray drains it ({row.draining_s:.0f} s were left)" if row.draining_s is not None else ""
    if bool(told) != bool(node.drains):
        draft.nodes[name] = replace(node, drains=told)
        noticed(draft, name, node.notice)


def noticed(draft: Draft, name: str, before: str) -> None:
    """A node that is about to go gets nothing new, and what runs there saves and moves."""
    why = draft.nodes[name].notice
    if bool(why) == bool(before):
        return
    draft.change(changed=True)
    if why:
        attempt_stops.save_all(draft, name, f"node {name} is about to go: {why}")


def look(draft: Draft) -> None:
    """Once per tick: make agents that are missing, end those that hang, forget nodes that left long ago."""
    for name, node in draft.nodes.items():
        if node.lost:
            if node.silent_s(draft.now.s) > FORGOTTEN_S and not draft.on_node(name):
                draft.nodes.pop(name)
        elif node.resting_s is not None:
            if draft.now.s - node.resting_s > REST_AGAIN_S:
                rest(draft, name)
        elif not node.has_agent:
            if node.making_s is None or draft.now.s - node.making_s > again_s(node.unmade):
                _make(draft, name)
        else:
            _hung(draft, node)


def again_s(unmade: int) -> float:
    """Before the next try to make an agent, after so many in vain."""
    return float(min(LONGEST_AGAIN_S, MADE_AGAIN_S * 2 ** min(max(0, unmade - QUICK_TRIES), 16)))


def _make(draft: Draft, name: str) -> None:
    node = draft.nodes[name]
    draft.nodes[name] = replace(node, has_agent=False, making_s=draft.now.s)
    draft.command(MakeAgent(name, node.ray_id))


def rest(draft: Draft, name: str) -> None:
    """Ray counts a node with an agent as busy: without, its autoscaler may take it away."""
    node = draft.nodes[name]
    draft.nodes[name] = replace(node, has_agent=False, making_s=None, resting_s=draft.now.s)
    draft.command(RestAgent(name, node.ray_id))
    draft.change(changed=True)


def wake(draft: Draft, name: str) -> None:
    """What it knew of itself holds until it tells anew; what runs there it has to tell first."""
    draft.nodes[name] = replace(draft.nodes[name], resting_s=None, listed_s=None, heard_s=draft.now.s)
    draft.change(changed=True)
    _make(draft, name)


def _hung(draft: Draft, node: Node) -> None:
    greets = node.facts is None or node.restarted_s > node.heard_s
    limit_s = HELLO_HUNG_S if greets else HUNG_S
    silent_s = min(node.silent_s(draft.now.s), draft.now.s - node.restarted_s)
    if silent_s > limit_s:
        why = f"the agent of {node.name} did not answer for {silent_s:.0f} s and was started again"
        draft.nodes[node.name] = replace(node, restarted_s=draft.now.s)
        draft.command(RestartAgent(node.name, node.ray_id, why))


def agent_made(draft: Draft, told: AgentMade) -> None:
    node = draft.nodes.get(told.node)
    if node is None or node.ray_id != told.ray_id or node.lost or node.resting:
        return
    if told.error:
        _unmade(draft, node, f"its agent could not be made: {told.error}")
    else:
        draft.nodes[told.node] = replace(node, has_agent=True, making_s=None, restarted_s=draft.now.s)


def agent_died(draft: Draft, told: AgentDied) -> None:
    node = draft.nodes.get(told.node)
    if node is None or node.ray_id != told.ray_id or node.lost or node.resting:
        return
    if draft.now.s - node.restarted_s > ENDED_BY_US_S and not node.restarts(draft.now.s):
        draft.nodes[node.name] = nodes.failed(node, "its agent ended", draft.now.s)
    if told.gone and told.why:
        _unmade(draft, draft.nodes[node.name], told.why)
    elif told.gone:
        _make(draft, node.name)


def _unmade(draft: Draft, node: Node, why: str) -> None:
    """It is tried again after a pause. The first times that is nobody's concern: Ray's head may be away."""
    tries = node.unmade + 1
    shown = why if tries >= QUICK_TRIES else node.broken
    if tries == 1 or shown != node.broken:
        draft.warn(f"node {node.name}: {why}; it is tried again")
    if shown != node.broken:
        draft.change(changed=True)
    draft.nodes[node.name] = replace(node, has_agent=False, making_s=draft.now.s, unmade=tries, broken=shown)


def agent_failed(draft: Draft, told: AgentFailed) -> None:
    """Until it tells what runs there. What runs is not known to have ended: its lease decides."""
    node = draft.nodes.get(told.node)
    if node is not None and node.ray_id == told.ray_id and node.broken != told.why and not node.resting:
        draft.nodes[node.name] = replace(node, broken=told.why)
        draft.warn(f"node {node.name}: {told.why}")
        draft.change(changed=True)

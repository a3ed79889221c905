"""Which nodes there are, whether their agents answer, and which take no new work. Pure."""

from dataclasses import replace

from cluster.errors import nearest
from orchestrator.core import ending, nodes
from orchestrator.core.commands import DropAgent, Fence, MakeAgent, Refuse, RestartAgent
from orchestrator.core.draft import Draft
from orchestrator.core.messages import (
    AgentDied,
    AgentFailed,
    AgentMade,
    DrainAsked,
    Joined,
    NodeSeen,
    NodesSeen,
    Parted,
    ResumeAsked,
)
from orchestrator.core.nodes import OWNER, Node

MADE_AGAIN_S = 1.0
"""Between two tries to make an agent."""

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

FORGOTTEN_S = 3600.0
"""So long a lost node without attempts is still told of."""


def joined(draft: Draft, told: Joined) -> None:
    """Nodes have a whole lease, from now on, to tell what runs there, after a lost head beside the time they take to
    find it again. Their fences are asked for: one that stands above an attempt was raised by a controller before us,
    or by one whose log is newer. Lost nodes can come back only from now on.
    """
    since_s = draft.now.s + (HEAD_REGAINED_S if draft.nodes.now else 0.0)
    draft.change(joined=True, joined_s=draft.now.s, changed=True)
    for node in draft.nodes.values():
        draft.nodes[node.name] = replace(node, lost_s=since_s)
    for live in draft.lives.values():
        draft.lives[live.job] = replace(live, since_s=since_s, asked={}, fence_asked_s=None, fenced_s=None)
        draft.command(Fence(live.job, live.epoch))


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
    )
    draft.change(changed=True)
    _make(draft, name)


def _lost(draft: Draft, node: Node) -> None:
    gone = node if node.restarts(draft.now.s) else nodes.failed(node, "Ray reported it dead", draft.now.s)
    draft.nodes[node.name] = replace(
        gone, lost="Ray reports the node dead", lost_s=draft.now.s, has_agent=False, making_s=None
    )
    draft.command(DropAgent(node.name, node.ray_id))
    draft.change(changed=True)


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
        ending.save_all(draft, name, f"node {name} is about to go: {why}")


def look(draft: Draft) -> None:
    """Once per tick: make agents that are missing, end those that hang, forget nodes that left long ago."""
    for name, node in draft.nodes.items():
        if node.lost:
            if node.silent_s(draft.now.s) > FORGOTTEN_S and not draft.on_node(name):
                draft.nodes.pop(name)
        elif not node.has_agent:
            if node.making_s is None or draft.now.s - node.making_s > MADE_AGAIN_S:
                _make(draft, name)
        else:
            _hung(draft, node)


def _make(draft: Draft, name: str) -> None:
    node = draft.nodes[name]
    draft.nodes[name] = replace(node, has_agent=False, making_s=draft.now.s)
    draft.command(MakeAgent(name, node.ray_id))


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
    if node is None or node.ray_id != told.ray_id or node.lost:
        return
    if told.error:
        draft.warn(f"the agent of {told.node} could not be made and is tried again: {told.error}")
    else:
        draft.nodes[told.node] = replace(node, has_agent=True, making_s=None, restarted_s=draft.now.s)


def agent_died(draft: Draft, told: AgentDied) -> None:
    node = draft.nodes.get(told.node)
    if node is None or node.ray_id != told.ray_id or node.lost:
        return
    if draft.now.s - node.restarted_s > ENDED_BY_US_S and not node.restarts(draft.now.s):
        draft.nodes[node.name] = nodes.failed(node, "its agent ended", draft.now.s)
    if told.gone:
        _make(draft, node.name)


def agent_failed(draft: Draft, told: AgentFailed) -> None:
    """Until it tells what runs there. What runs is not known to have ended: its lease decides."""
    node = draft.nodes.get(told.node)
    if node is not None and node.ray_id == told.ray_id and node.broken != told.why:
        draft.nodes[node.name] = replace(node, broken=told.why)
        draft.warn(f"node {node.name}: {told.why}")
        draft.change(changed=True)


def drain(draft: Draft, asked: DrainAsked) -> None:
    if asked.node not in draft.nodes:
        draft.command(Refuse(f"no node {asked.node!r}", nearest(asked.node, sorted(draft.nodes)), absent=True))
        return
    if draft.control.drained.get(asked.node) != asked.reason:
        draft.note(OWNER + asked.node, "drained", reason=asked.reason)
        draft.drained[asked.node] = asked.reason
        draft.change(changed=True)
    if asked.now:
        ending.save_all(draft, asked.node, f"node {asked.node} is drained{f': {asked.reason}' if asked.reason else ''}")


def resume(draft: Draft, asked: ResumeAsked) -> None:
    node = draft.nodes.get(asked.node)
    if node is None and asked.node not in draft.drained:
        draft.command(Refuse(f"no node {asked.node!r}", nearest(asked.node, sorted(draft.nodes)), absent=True))
        return
    if asked.node in draft.drained:
        draft.note(OWNER + asked.node, "undrained")
        draft.drained.pop(asked.node)
    if node is not None:
        draft.nodes[asked.node] = replace(node, failures=(), quarantined_until_s=0.0)
    draft.change(changed=True)

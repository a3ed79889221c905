"""Verbs of `nodes`, written by docs/generate.py. Change orchestrator/verbs/nodes.py instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.client.link import Link, Rows
    from orchestrator.views.fleet import NodeView


class Nodes:
    def __init__(self, link: Link):
        self._link = link

    def list(self) -> Rows[NodeView]:
        """Every node with its facts, its devices and the jobs to which they are allocated."""
        result: Rows[NodeView] = self._link.plain("GET", "/v1/nodes", {})
        return result

    def drain(self, node: str, *, now: bool = False, reason: str = "", key: str = "") -> NodeView:
        """Stop placing jobs on a node. With `now`, its attempts also save a checkpoint and move to other nodes.

        - `node`: name of a node
        - `now`: its attempts save and move at once (default: they may end on the node)
        - `reason`: why; the node's `closed` contains it
        - `key`: idempotency key: a repeated call with the same key and arguments counts once
        """
        result: NodeView = self._link.plain(
            "POST", "/v1/nodes/{node}/drain", {"node": node}, {"now": now, "reason": reason}, key=key
        )
        return result

    def resume(self, node: str, *, key: str = "") -> NodeView:
        """Place jobs again on a node that was drained or that failed too often.

        - `node`: name of a node
        - `key`: idempotency key: a repeated call with the same key and arguments counts once
        """
        result: NodeView = self._link.plain("POST", "/v1/nodes/{node}/resume", {"node": node}, key=key)
        return result

    def remove(self, node: str, *, key: str = "") -> NodeView:
        """Remove a lost node that will not come back.

        - `node`: name of a node
        - `key`: idempotency key: a repeated call with the same key and arguments counts once
        """
        result: NodeView = self._link.plain("POST", "/v1/nodes/{node}/remove", {"node": node}, key=key)
        return result

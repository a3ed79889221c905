"""Nodes from Python: `o.nodes`."""

from orchestrator.client.client import Client
from orchestrator.show import fleet as show
from orchestrator.show.notebook_views import KeyValueView, TableView


class Nodes:
    def __init__(self, client: Client):
        self._client = client

    def list(self) -> TableView:
        """Every node with its devices."""
        return TableView(self._client.nodes.list(), show.devices)

    def drain(self, node: str, *, now: bool = False, reason: str = "", key: str = "") -> KeyValueView:
        """Stop placing jobs on a node. With `now`, its attempts also save a checkpoint and move to other nodes."""
        return KeyValueView(self._client.nodes.drain(node, now=now, reason=reason, key=key), show.node_state)

    def resume(self, node: str, *, key: str = "") -> KeyValueView:
        """Place jobs on a node again."""
        return KeyValueView(self._client.nodes.resume(node, key=key), show.node_state)

    def remove(self, node: str, *, key: str = "") -> KeyValueView:
        """Remove a lost node that will not come back."""
        return KeyValueView(self._client.nodes.remove(node, key=key), show.node_state)

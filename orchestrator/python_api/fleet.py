"""The fleet from Python: `o.fleet`."""

from orchestrator.client.client import Client
from orchestrator.client.inventory import backend_rows
from orchestrator.show import fleet as show
from orchestrator.show.notebook_views import KeyValueView, TableView


class Fleet:
    def __init__(self, client: Client):
        self._client = client

    def show(self) -> KeyValueView:
        """Pools with their kinds, nodes and devices."""
        return KeyValueView(self._client.fleet.show(), show.fleet)

    def backends(self) -> TableView:
        """Every back end: the fleet's devices for it, or why there are none."""
        return TableView(backend_rows(self._client.nodes.list()), show.backends)

    def doctor(self) -> TableView:
        """Problems of the fleet, each with its remedy."""
        return TableView(self._client.fleet.doctor(), show.findings)

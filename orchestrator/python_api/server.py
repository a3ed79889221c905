"""The server from Python: `o.server`."""

from orchestrator.client.client import Client
from orchestrator.show.notebook_views import KeyValueView
from orchestrator.show.table import facts


class Server:
    def __init__(self, client: Client):
        self._client = client

    def version(self) -> KeyValueView:
        """Version, protocol, process id, home and start time."""
        return KeyValueView(self._client.server.version(), facts)

    def health(self) -> KeyValueView:
        """State of the controller, the store and the nodes' connections; numbers of jobs by state."""
        return KeyValueView(self._client.server.health(), facts)

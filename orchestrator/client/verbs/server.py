"""Verbs of `server`, written by docs/generate.py. Change orchestrator/verbs/server.py instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.client.link import Link
    from orchestrator.views.server import HealthView, LivenessView, StoppingView, VersionView


class Server:
    def __init__(self, link: Link):
        self._link = link

    def ping(self, *, challenge: str = "") -> LivenessView:
        """Health check. The only path that needs no token.

        With a `challenge`, the response has `proof`: the HMAC-SHA256 of PORT:CHALLENGE (port 0: the Unix socket)
        under the HMAC-SHA256 of "polyfleet: this listener knows the token" under the token. A client checks it
        before it sends the token to a port.

        - `challenge`: a random number in hexadecimal digits
        """
        result: LivenessView = self._link.plain("GET", "/healthz", {"challenge": challenge})
        return result

    def health(self) -> HealthView:
        """State of the server: age of the controller's last turn, waiting calls, silence of nodes, state of the
        store.
        """
        result: HealthView = self._link.plain("GET", "/v1/health", {})
        return result

    def version(self) -> VersionView:
        """Version, protocol, process id, home and start time. Clients first compare `version` with their own."""
        result: VersionView = self._link.plain("GET", "/v1/version", {})
        return result

    def shutdown(self) -> StoppingView:
        """Stop the server. The fleet and its attempts keep running; the next server takes them over."""
        result: StoppingView = self._link.plain("POST", "/v1/shutdown", {})
        return result

"""Verbs of `fleet`, written by docs/generate.py. Change orchestrator/verbs/fleet.py instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.client.link import Link, Rows
    from orchestrator.views.fleet import FindingView, FleetView


class Fleet:
    def __init__(self, link: Link):
        self._link = link

    def show(self) -> FleetView:
        """The fleet by pools: kinds, nodes, devices, number of free devices, price."""
        result: FleetView = self._link.plain("GET", "/v1/fleet", {})
        return result

    def doctor(self) -> Rows[FindingView]:
        """Findings: level (info, warning, error), subject, message, remedy, node."""
        result: Rows[FindingView] = self._link.plain("GET", "/v1/doctor", {})
        return result

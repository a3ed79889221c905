"""Verbs of `schema`, written by docs/generate.py. Change orchestrator/verbs/schema.py instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from orchestrator.client.link import Link
    from orchestrator.views.values import JsonObject


class Schema:
    def __init__(self, link: Link):
        self._link = link

    def show(self, kind: Literal["job", "fleet"]) -> JsonObject:
        """The JSON Schema of a job spec or of a fleet file."""
        result: JsonObject = self._link.plain("GET", "/v1/schema/{kind}", {"kind": kind})
        return result

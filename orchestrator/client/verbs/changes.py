"""Verbs of `changes`, written by docs/generate.py. Change orchestrator/verbs/changes.py instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.client.link import Link
    from orchestrator.views.jobs import ChangesPage, JobEvent


class Changes:
    def __init__(self, link: Link):
        self._link = link

    def wait(self, *, after: int = 0, timeout_s: float = 10.0) -> ChangesPage:
        """Long poll: responds as soon as there are events after number `after`, or with none after `timeout_s`.
        Continue with `last`; it may increase without an event, because events are removed with old jobs.

        - `after`: number of the last event received: `last` or `seq`
        """
        result: ChangesPage = self._link.plain("GET", "/v1/changes", {"after": after, "timeout_s": timeout_s})
        return result

    def follow(self, *, after: int = 0) -> Iterator[JobEvent]:
        """Stream the events of all jobs after number `after`, as they happen: server-sent events `change`.

        - `after`: number of the last event received: `last` or `seq`
        """
        result: Iterator[JobEvent] = (
            data for _, data in self._link.stream("GET", "/v1/changes/stream", {"after": after})
        )
        return result

"""Verbs of `benchmarks`, written by docs/generate.py. Change orchestrator/verbs/benchmarks.py instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.client.link import Link, Rows
    from orchestrator.views.benchmark_lines import BenchmarkLine
    from orchestrator.views.benchmarks import RunView
    from orchestrator.views.values import JsonObject


class Benchmarks:
    def __init__(self, link: Link):
        self._link = link

    def start(self, request: JsonObject, *, code_archive: str = "", key: str = "") -> RunView:
        """Start a run: a job for each node that it measures. It is durable when this responds.

        - `request`: what to measure: cases, precisions, levels, pools, kinds, rounds, …
        - `code_archive`: SHA-256 of an uploaded code archive, or empty
        - `key`: idempotency key: a repeated call with the same key and arguments counts once
        """
        result: RunView = self._link.once(
            "POST", "/v1/benchmarks", {}, {"request": request, "code_archive": code_archive}, key=key
        )
        return result

    def list(self) -> Rows[RunView]:
        """All runs, the newest last."""
        result: Rows[RunView] = self._link.plain("GET", "/v1/benchmarks", {})
        return result

    def show(self, ref: str) -> RunView:
        """One run: its state, the devices that it measures, its current step. `latest` is the newest run.

        - `ref`: id of a run, a unique prefix of it, or `latest`
        """
        result: RunView = self._link.plain("GET", "/v1/benchmarks/{ref}", {"ref": ref})
        return result

    def lines(self, ref: str, *, after: int = 0) -> Rows[BenchmarkLine]:
        """Result lines after number `after`, oldest first.

        - `ref`: id of a run, a unique prefix of it, or `latest`
        """
        result: Rows[BenchmarkLine] = self._link.plain(
            "GET", "/v1/benchmarks/{ref}/lines", {"ref": ref, "after": after}
        )
        return result

    def cancel(self, ref: str, *, key: str = "") -> RunView:
        """Stop a run. Results measured so far remain. A run that has ended is not changed.

        - `ref`: id of a run, a unique prefix of it, or `latest`
        - `key`: idempotency key: a repeated call with the same key and arguments counts once
        """
        result: RunView = self._link.plain("POST", "/v1/benchmarks/{ref}/cancel", {"ref": ref}, key=key)
        return result

    def baseline(self, ref: str, *, key: str = "") -> RunView:
        """Make this run the baseline with which later runs are compared.

        - `ref`: id of a run, a unique prefix of it, or `latest`
        - `key`: idempotency key: a repeated call with the same key and arguments counts once
        """
        result: RunView = self._link.plain("POST", "/v1/benchmarks/{ref}/baseline", {"ref": ref}, key=key)
        return result

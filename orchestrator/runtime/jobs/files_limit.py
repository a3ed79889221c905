"""Limit the files of ended jobs in each pool's storage: remove those of the jobs that ended first."""

import logging
import os
from collections.abc import Callable, Mapping

from cluster.errors import PolyfleetError, UserError
from cluster.input.sizes import size_bytes
from orchestrator.core.states import TERMINAL
from orchestrator.runtime.agents.agents import Agents
from orchestrator.runtime.jobs.jobs import Jobs

log = logging.getLogger(__name__)

SETTING = "POLYFLEET_KEEP_FILES"
FOREVER = "forever"
MEASURE_S = 600.0


def keep_files_bytes(environment: Mapping[str, str] = os.environ) -> int | None:
    """Maximum bytes per pool (None: files are retained as long as their jobs).

    Raises UserError if it is not a size.
    """
    text = environment.get(SETTING, "").strip() or FOREVER
    if text.lower() == FOREVER:
        return None
    try:
        return size_bytes(text)
    except UserError as e:
        raise UserError(f"{SETTING}: {e.message}", f"write e.g. {SETTING}=500GB, or {SETTING}={FOREVER}") from None


def select_jobs(sizes: Mapping[str, int], ended_s: Mapping[str, float], limit_bytes: int) -> list[str]:
    """Select ended jobs whose files are removed, so that the rest of `sizes` is within the limit."""
    total, selected = sum(sizes.values()), []
    for job in sorted(ended_s, key=lambda job: ended_s[job]):
        if total <= limit_bytes:
            break
        total -= sizes[job]
        selected.append(job)
    return selected


class FilesLimit:
    """Removes files beyond the limit.

    The housekeeping thread calls `remove` regularly, which also calls `then`.
    """

    def __init__(self, agents: Agents, jobs: Jobs, limit_bytes: int | None, then: Callable[[], None] = lambda: None):
        self._agents, self._jobs, self._limit_bytes, self._then = agents, jobs, limit_bytes, then

    def remove(self) -> None:
        if self._limit_bytes is not None:
            self._limit_pools(self._limit_bytes)
        self._then()

    def _limit_pools(self, limit_bytes: int) -> None:
        nodes = {node.facts.pool: name for name, node in self._agents.ready() if node.facts}
        for pool, node in sorted(nodes.items()):
            try:
                self._limit_pool(pool, node, limit_bytes)
            except PolyfleetError as e:
                log.info("the files of jobs in pool %s could not be checked; they are checked again later: %s", pool, e)

    def _limit_pool(self, pool: str, node: str, limit_bytes: int) -> None:
        sizes: dict[str, int] = self._agents.call(node, "files_sizes", timeout_s=MEASURE_S)
        ended_s, epochs = {}, {}
        for job in sizes if sum(sizes.values()) > limit_bytes else ():
            record = self._jobs.get(job)
            if record and record.job.state in TERMINAL and record.live_attempt is None and record.ended_s is not None:
                ended_s[job], epochs[job] = record.ended_s, record.job.epoch
        for job in select_jobs(sizes, ended_s, limit_bytes):
            self._agents.call(node, "remove_files", job, epochs[job])
            self._agents.call(node, "remove_stored_files", job, epochs[job])
            log.info("the files of %s in pool %s were removed: %s is %d bytes", job, pool, SETTING, limit_bytes)

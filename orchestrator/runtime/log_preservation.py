"""Before a node that may be given back forgets an attempt that has ended, the attempt's logs are kept by the server."""

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from orchestrator.core.commands import Forget
from orchestrator.runtime.agents import Agents
from orchestrator.runtime.jobs import Jobs
from orchestrator.runtime.kept_logs import KeptLogs
from orchestrator.runtime.logs import placed_ranks

log = logging.getLogger(__name__)

THREADS = 2
TRIES = 5
"""A log that cannot be kept does not hold its node for ever: somebody pays for it."""


class Keeping:
    """`pools` are those whose nodes may be given back. Only the controller's thread calls `before`."""

    def __init__(self, kept: KeptLogs, agents: Agents, jobs: Jobs):
        self._kept, self._agents, self._jobs = kept, agents, jobs
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kept-logs")
        self._under_way: set[Forget] = set()
        self._failed: Counter[Forget] = Counter()
        self.pools: frozenset[str] = frozenset()

    def before(self, asked: Forget, then: Callable[[], None]) -> None:
        """`then` at once where nothing is to be kept, else in another thread. Where that fails it is not called: the
        controller asks for the same again.
        """
        node = self._agents.get(asked.node)
        if node is None or node.facts is None or node.facts.pool not in self.pools:
            then()
        elif asked not in self._under_way:
            self._under_way.add(asked)
            self._threads.submit(self._then, asked, then)

    def _then(self, asked: Forget, then: Callable[[], None]) -> None:
        try:
            self._keep(asked)
        except Exception as e:
            self._failed[asked] += 1
            if self._failed[asked] < TRIES:
                log.info("the logs of %s on %s are kept later: %s", asked.job, asked.node, e)
                return
            log.warning("the logs of %s are lost if node %s is given back: %s", asked.job, asked.node, e)
        finally:
            self._under_way.discard(asked)
        self._failed.pop(asked, None)
        then()

    def _keep(self, asked: Forget) -> None:
        if (record := self._jobs.get(asked.job)) is None:
            return
        for attempt in (attempt for attempt in record.attempts if attempt.epoch == asked.epoch):
            for rank, node in placed_ranks(record, attempt):
                if node == asked.node:
                    self._kept.keep(asked.job, asked.epoch, rank, node)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

"""Copy the logs of an ended attempt to the server before a node that may be released removes them."""

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from orchestrator.core.controller.commands import RemoveFiles
from orchestrator.runtime.agents.agents import Agents
from orchestrator.runtime.jobs.jobs import Jobs
from orchestrator.runtime.jobs.log_copies import LogCopies
from orchestrator.runtime.jobs.logs import placed_ranks

log = logging.getLogger(__name__)

THREADS = 2
TRIES = 5
"""After this many failures the log is not copied: its node costs money and must not be held for ever."""


class LogPreservation:
    """Copies logs.

    `pools`: pools whose nodes may be released. Only the controller's thread calls `preserve_before`.
    """

    def __init__(self, log_copies: LogCopies, agents: Agents, jobs: Jobs):
        self._log_copies, self._agents, self._jobs = log_copies, agents, jobs
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kept-logs")
        self._in_progress: set[RemoveFiles] = set()
        self._failures: Counter[RemoveFiles] = Counter()
        self.pools: frozenset[str] = frozenset()

    def preserve_before(self, command: RemoveFiles, callback: Callable[[], None]) -> None:
        """Call `callback` after copying the logs, in another thread, or at once if there is nothing to copy.

        If copying fails, `callback` is not called, and the controller repeats its command.
        """
        node = self._agents.get(command.node)
        if node is None or node.facts is None or node.facts.pool not in self.pools:
            callback()
        elif command not in self._in_progress:
            self._in_progress.add(command)
            self._threads.submit(self._preserve, command, callback)

    def _preserve(self, command: RemoveFiles, callback: Callable[[], None]) -> None:
        try:
            self._copy_logs(command)
        except Exception as e:
            self._failures[command] += 1
            if self._failures[command] < TRIES:
                log.info("the logs of %s on %s could not be copied yet: %s", command.job, command.node, e)
                return
            log.warning("the logs of %s are lost if node %s is released: %s", command.job, command.node, e)
        finally:
            self._in_progress.discard(command)
        self._failures.pop(command, None)
        callback()

    def _copy_logs(self, command: RemoveFiles) -> None:
        if (record := self._jobs.get(command.job)) is None:
            return
        for attempt in (attempt for attempt in record.attempts if attempt.epoch == command.epoch):
            for rank, node in placed_ranks(record, attempt):
                if node == command.node:
                    self._log_copies.copy(command.job, command.epoch, rank, node)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

"""Batch concurrent calls: one thread handles all waiting items in one call, so that shared work is done once."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

import anyio.to_thread

MAX_CALLS = 2
"""Concurrent calls: while one waits for the disk, the next is prepared."""
MAX_BATCH = 64
SLOW_S = 0.1
"""Seconds after which the next call starts beside a slow one, so that later items need not wait for two calls."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batcher(Generic[Item, Result]):
    """Runs `call`, which returns a value or an error for each item. Items that arrive during a call share the next one.

    Belongs to one event loop.
    """

    def __init__(self, call: Callable[[Sequence[Item]], Sequence[Result | Exception]], slow_s: float = SLOW_S):
        self._call, self._slow_s = call, slow_s
        self._waiting: deque[tuple[Item, asyncio.Future[Result | Exception]]] = deque()
        self._callers = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, item: Item) -> Result:
        """Pass `item` to `call`; return or raise its result for it."""
        future: asyncio.Future[Result | Exception] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._callers < MAX_CALLS:
            self._callers += 1
            self._start_task(self._run_calls())
        result = await future
        if isinstance(result, Exception):
            raise result
        return result

    async def _run_calls(self) -> None:
        """Call until no item waits."""
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
            await asyncio.wait({self._start_task(self._run_call(batch))}, timeout=self._slow_s)
        self._callers -= 1

    async def _run_call(self, batch: list[tuple[Item, asyncio.Future[Result | Exception]]]) -> None:
        results: Sequence[Result | Exception]
        try:
            results = await anyio.to_thread.run_sync(self._call, [item for item, _ in batch])
        except Exception as e:
            results = [e] * len(batch)
        for (_, future), one in zip(batch, results, strict=True):
            if not future.done():
                future.set_result(one)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Create a task and keep a reference to it, because asyncio itself does not keep a task alive."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

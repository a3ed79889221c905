"""Calls that come together are made together: by one thread, and whatever they share is done once for all of them."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

import anyio.to_thread

AT_ONCE = 2
"""Calls under way: while one waits for the disk, the next is prepared."""
MOST = 64
SLOW_S = 0.1
"""A call that takes longer is not waited for: who comes after it would wait for two."""

Item = TypeVar("Item")
Told = TypeVar("Told")


class Batcher(Generic[Item, Told]):
    """`call` takes items and gives a value or an error for each. What comes while it is called shares the next call.

    For one event loop.
    """

    def __init__(self, call: Callable[[Sequence[Item]], Sequence[Told | Exception]], slow_s: float = SLOW_S):
        self._call, self._slow_s = call, slow_s
        self._waiting: deque[tuple[Item, asyncio.Future[Told | Exception]]] = deque()
        self._callers = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, item: Item) -> Told:
        """Returns or raises what `call` gave for `item`."""
        answered: asyncio.Future[Told | Exception] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, answered))
        if self._callers < AT_ONCE:
            self._callers += 1
            self._begin(self._make_calls())
        told = await answered
        if isinstance(told, Exception):
            raise told
        return told

    async def _make_calls(self) -> None:
        """Until nobody waits."""
        while self._waiting:
            some = [self._waiting.popleft() for _ in range(min(MOST, len(self._waiting)))]
            await asyncio.wait({self._begin(self._make(some))}, timeout=self._slow_s)
        self._callers -= 1

    async def _make(self, some: list[tuple[Item, asyncio.Future[Told | Exception]]]) -> None:
        told: Sequence[Told | Exception]
        try:
            told = await anyio.to_thread.run_sync(self._call, [item for item, _ in some])
        except Exception as e:
            told = [e] * len(some)
        for (_, answered), one in zip(some, told, strict=True):
            if not answered.done():
                answered.set_result(one)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """asyncio itself does not keep a task alive."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

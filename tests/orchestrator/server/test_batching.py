"""Calls that come while others are under way share the next call; each gets its own answer, and none waits for a slow
one that is not its own.
"""

import asyncio
import threading

import pytest
from patience import LIMIT_S

from cluster.errors import UserError
from orchestrator.server.http.batching import MAX_BATCH, MAX_CALLS, Batcher

NEVER_S = 3600.0
"""No call counts as slow: how long a thread takes to start says nothing."""


def test_what_comes_while_calls_are_under_way_shares_the_next():
    calls, free = [], threading.Event()

    def call(items):
        calls.append(list(items))
        free.wait(LIMIT_S)
        return [item * 10 for item in items]

    async def ask_all():
        together = Batcher(call, slow_s=NEVER_S)
        asked = []
        for n in range(MAX_CALLS):
            asked.append(asyncio.create_task(together.submit(n)))
            while len(calls) <= n:
                await asyncio.sleep(0)
        asked += [asyncio.create_task(together.submit(n)) for n in range(MAX_CALLS, MAX_CALLS + MAX_BATCH + 3)]
        await asyncio.sleep(0)
        assert len(calls) == MAX_CALLS
        free.set()
        return await asyncio.gather(*asked)

    assert asyncio.run(ask_all()) == [n * 10 for n in range(MAX_CALLS + MAX_BATCH + 3)]
    first, after = calls[:MAX_CALLS], calls[MAX_CALLS:]
    assert [len(items) for items in first] == [1] * MAX_CALLS
    assert sorted(len(items) for items in after) == [3, MAX_BATCH], "threads of their own, in no order"


def test_each_gets_its_own_error_and_a_call_that_fails_is_told_to_all_of_it():
    def call(items):
        if "broken" in items:
            raise UserError("the call failed")
        return [UserError(f"{item} is refused") if item == "bad" else item for item in items]

    async def ask(*items):
        together = Batcher(call)
        return await asyncio.gather(*(together.submit(item) for item in items), return_exceptions=True)

    good, bad, fine = asyncio.run(ask("good", "bad", "fine"))
    assert (good, fine) == ("good", "fine")
    with pytest.raises(UserError, match="bad is refused"):
        raise bad
    assert [str(e) for e in asyncio.run(ask("good", "broken"))] == ["the call failed"] * 2


def test_nobody_waits_for_slow_calls_of_others():
    free = threading.Event()

    def call(items):
        if "slow" in items:
            free.wait(LIMIT_S)
        return items

    async def ask_all():
        together, slow = Batcher(call, slow_s=0.0), []
        for _ in range(MAX_CALLS):
            slow.append(asyncio.create_task(together.submit("slow")))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert await asyncio.wait_for(together.submit("quick"), 20) == "quick"
        assert not any(task.done() for task in slow)
        free.set()
        await asyncio.gather(*slow)

    asyncio.run(ask_all())


def test_one_that_is_cancelled_does_not_disturb_the_others():
    free = threading.Event()

    def call(items):
        free.wait(LIMIT_S)
        return items

    async def ask_all():
        together = Batcher(call)
        gone, stays = (asyncio.create_task(together.submit(name)) for name in ("gone", "stays"))
        await asyncio.sleep(0)
        gone.cancel()
        free.set()
        return await stays

    assert asyncio.run(ask_all()) == "stays"

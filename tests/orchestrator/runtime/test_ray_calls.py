import os
import subprocess
import sys
import threading
import weakref

import pytest
from patience import LIMIT_S, wait_for

from cluster.errors import FleetError
from orchestrator.runtime.agents.ray_calls import ClusterLeft, RayCalls


@pytest.fixture
def head():
    """What a call waits for, as for a head that does not answer; it answers at the end of the test."""
    answers = threading.Event()
    yield answers
    answers.set()


def test_a_call_returns_and_raises_as_it_would_alone():
    engine = RayCalls()
    assert engine.call("add", lambda: 1 + 1, LIMIT_S) == 2
    with pytest.raises(ZeroDivisionError):
        engine.call("divide", lambda: 1 // 0, LIMIT_S)
    assert engine.blocked() == [] and not engine.exhausted


def test_a_late_call_is_an_error_is_named_and_its_value_is_given_up(head):
    engine, undone = RayCalls(), []
    with pytest.raises(FleetError, match="not respond to the request to reserve"):
        engine.call("reserve", lambda: head.wait(LIMIT_S) and "a group", 0.01, undone.append)
    [late] = engine.blocked()
    assert late.name == "reserve" and late.waiting_s > 0.01
    head.set()
    assert wait_for(lambda: undone) == ["a group"]
    assert wait_for(lambda: engine.blocked() == [])


def test_asking_never_waits_also_when_every_thread_is_blocked(head):
    engine, answers = RayCalls(max_threads=2), []
    for n in range(5):
        engine.submit(f"call {n}", lambda n=n: head.wait(LIMIT_S) and n, 0.01, answers.append)
    wait_for(lambda: len(engine.blocked()) == 5)
    assert engine.exhausted and answers == []
    head.set()
    assert wait_for(lambda: sorted(answers) == [0, 1, 2, 3, 4])
    assert not engine.exhausted


def test_a_thread_that_waits_holds_nothing_of_its_last_call():
    engine, used = RayCalls(), threading.Event()
    use = weakref.ref(used)
    assert engine.call("use", lambda used=used: used.is_set(), LIMIT_S) is False
    del used
    wait_for(lambda: use() is None)


def test_others_go_on_while_one_call_is_blocked(head):
    engine = RayCalls(max_threads=2)
    engine.submit("nodes", lambda: head.wait(LIMIT_S), 0.01, lambda _: None)
    assert [engine.call("other", lambda n=n: n, LIMIT_S) for n in range(50)] == list(range(50))


def test_an_error_is_an_answer_too():
    engine, answers = RayCalls(), []
    engine.submit("divide", lambda: 1 // 0, LIMIT_S, answers.append)
    assert isinstance(wait_for(lambda: answers)[0], ZeroDivisionError)


def test_what_was_asked_of_a_cluster_that_was_left_is_forgotten_and_its_threads_replaced(head):
    engine, answers = RayCalls(max_threads=2), []
    for _ in range(3):
        engine.submit("nodes", lambda: head.wait(LIMIT_S), 0.0, answers.append)
    wait_for(lambda: engine.exhausted)
    engine.abandon()
    assert [str(a) for a in answers] == [str(ClusterLeft("nodes"))] * 3
    assert engine.blocked() == [] and not engine.exhausted
    assert engine.call("nodes", lambda: "of the next cluster", LIMIT_S) == "of the next cluster"
    head.set()
    assert engine.call("nodes", lambda: "again", LIMIT_S) == "again"
    assert len(answers) == 3


def test_who_waits_for_a_cluster_that_was_left_is_told_at_once(head):
    engine, told = RayCalls(), []

    def call():
        try:
            engine.call("release devices", lambda: head.wait(LIMIT_S), 0.3)
        except FleetError as e:
            told.append(str(e))

    waiting = threading.Thread(target=call, daemon=True)
    waiting.start()
    wait_for(lambda: engine._calls)
    engine.abandon()
    waiting.join(LIMIT_S)
    assert not waiting.is_alive()
    assert told == ["the cluster was left during the call to release devices; try again"]


def test_a_call_knows_that_its_cluster_was_left(head):
    """What it would still do there could reach the next cluster."""
    engine, left = RayCalls(), []
    engine.submit(
        "raise a fence",
        lambda: (left.append(engine.is_left), head.wait(LIMIT_S), left.append(engine.is_left)),
        1.0,
        str,
    )
    wait_for(lambda: left)
    engine.abandon()
    head.set()
    assert wait_for(lambda: len(left) == 2) and left == [False, True]
    engine.call("raise a fence", lambda: left.append(engine.is_left), LIMIT_S)
    assert left[-1] is False


UNCONNECTED = """
import sys
from orchestrator.runtime.agents.ray_calls import RAY
assert "ray" not in sys.modules
def find():
    import ray
    return ray.get_actor("agent")
try:
    print(RAY.run("find an agent", find, 60))
except Exception as e:
    print("refused", type(e).__name__)
import ray
print(ray.is_initialized())
"""


def test_a_call_that_finds_no_cluster_starts_none():
    """As one that is made just after a cluster was left. Ray would start one of its own on this machine."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    words = [sys.executable, "-c", UNCONNECTED]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split("\n")[0].startswith("refused") and done.stdout.split("\n")[1] == "False"

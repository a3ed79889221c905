"""What the server writes about the fences of jobs, and where agents read it: both build the key alone."""

import queue

import pytest
from patience import LIMIT_S

from cluster.fleet.identity import fleet_identity
from cluster.host import fences as folders
from orchestrator.runtime.agents import fences


@pytest.fixture
def homes(tmp_path, recorded, monkeypatch):
    """`homes(name)` makes that one this process's home, in a Ray cluster that all share: (its identity, its agent)."""
    fleet = recorded.RecordedFleet(tmp_path, monkeypatch)
    facts = recorded.RECORDED[0]

    def enter(name):
        home = tmp_path / name
        home.mkdir(mode=0o700, exist_ok=True)
        monkeypatch.setenv("POLYFLEET_HOME", str(home))
        return fleet_identity(home), recorded.RecordedAgent(facts, home, fleet.store)

    enter.store = fleet.store
    return enter


def raised(job, epoch):
    """What stands, once the server has raised it."""
    answers = queue.SimpleQueue()
    fences.raise_to(job, epoch, answers.put)
    return answers.get(timeout=LIMIT_S)


def test_a_fence_is_written_where_agents_of_its_fleet_read_it(homes):
    identity, agent = homes("home")
    assert agent._fences.epoch("job") == 0
    assert raised("job", 3) == 3
    assert homes.store.values == {f"polyfleet/{identity}/fence/job": b"3"}
    assert folders.read(folders.local_folder(), "job") == 3
    folders.remove(folders.local_folder(), "job")  # as on a node of another machine, which sees the store alone
    assert agent._fences.epoch("job") == 3


def test_fences_of_two_fleets_for_a_job_of_one_name_are_apart(homes):
    (mine, my_agent), (other, other_agent) = homes("mine"), homes("other")
    assert mine != other
    assert raised("job", 9) == 9
    homes("mine")
    assert raised("job", 3) == 3, "the other's is higher, and says nothing of this job"
    assert (my_agent._fences.epoch("job"), other_agent._fences.epoch("job")) == (3, 9)
    fences.remove("job")
    assert (my_agent._fences.epoch("job"), other_agent._fences.epoch("job")) == (0, 9)
    assert list(homes.store.values) == [f"polyfleet/{other}/fence/job"]


def lowered(job, epoch):
    answers = queue.SimpleQueue()
    fences.lower_to(job, epoch, answers.put)
    return answers.get(timeout=LIMIT_S)


@pytest.fixture
def failing(homes, monkeypatch):
    """Writes to the store fail while something is in it; those to the folder do not."""
    homes("home")
    failing, put = set(), homes.store.put

    def refused(key, value, **more):
        if failing:
            raise RuntimeError("the head is gone")
        return put(key, value, **more)

    monkeypatch.setattr("ray.experimental.internal_kv._internal_kv_put", refused)
    return failing


def test_a_fence_that_was_raised_in_the_folder_alone_is_taken_down_there(homes, failing):
    """Ranks read the folder before they save: they would wait without end."""
    raised("job", 1)
    failing.add("store")
    assert isinstance(raised("job", 2), Exception)
    assert folders.read(folders.local_folder(), "job") == 2
    failing.clear()
    assert lowered("job", 1) == 1
    assert folders.read(folders.local_folder(), "job") == 1


def test_a_fence_that_was_raised_before_the_store_was_lost_is_taken_down_in_the_folder(homes, failing):
    raised("job", 2)
    homes.store.values.clear()
    assert lowered("job", 1) == 1
    assert folders.read(folders.local_folder(), "job") == 1


def test_a_fence_that_was_lowered_in_the_folder_alone_is_raised_there(homes, failing):
    """Ranks would save beside those that replaced them."""
    raised("job", 2)
    failing.add("store")
    assert isinstance(lowered("job", 1), Exception)
    failing.clear()
    assert raised("job", 2) == 2
    assert folders.read(folders.local_folder(), "job") == 2


def test_the_fence_of_a_newer_attempt_is_not_lowered(homes, failing):
    raised("job", 5)
    assert lowered("job", 1) == 5
    assert folders.read(folders.local_folder(), "job") == 5

"""A job's files go where its next attempt runs, also among nodes of a pool that share no storage."""

import time
from dataclasses import replace

import pytest

from cluster.errors import FleetError
from orchestrator.core.controller.attempts import PreviousAttempt
from orchestrator.core.controller.commands import Launch
from orchestrator.runtime.agents.agents import AgentHandle, Agents
from orchestrator.runtime.checkpoints.bandwidth_limit import RateLimit
from orchestrator.runtime.files.file_locations import FileLocator
from orchestrator.runtime.files.file_moves import FileMoves


class Nodes(Agents):
    """The nodes of the fleet, and others of pool `cpu` whose storage is their own."""

    def __init__(self, live, recorded, *others, away=()):
        super().__init__(lambda message: None)
        self.problem = ""
        agents = live.service.agents
        self._handles = dict(agents._handles)
        self.nodes = {name: replace(node, last_contact_s=float("inf")) for name, node in agents.nodes.items()}
        self.storages = {name: live.home / "storage" / name.partition("-")[0] for name in self.nodes}
        for name in others:
            facts = next(facts for facts in recorded.RECORDED if facts["node"] == "cpu-0") | {"node": name}
            home = live.home.with_name(name)
            home.mkdir(mode=0o700)
            agent = recorded.RecordedAgent(facts, home, live.fleet.store)
            self._handles[name] = AgentHandle(name, name, recorded.Actor(agent))
            known = replace(self.nodes["cpu-0"].facts, node=name, host=name, storage=str(home / "storage/cpu"))
            self.nodes[name] = replace(self.nodes["cpu-0"], name=name, ray_id=name, facts=known)
            self.storages[name] = home / "storage/cpu"
        for name in away:
            lost_s = time.monotonic() - 7200.0
            self.nodes[name] = replace(self.nodes[name], lost_reason="it was powered off", lost_s=lost_s)

    def wrote(self, node, epoch, text):
        folder = self.storages[node] / f"j/output-{epoch}"
        folder.mkdir(parents=True)
        (folder / "who").write_text(text)

    def read(self, node, epoch):
        path = self.storages[node] / f"j/output-{epoch}/who"
        return path.read_text() if path.exists() else None


def launch(epoch, pool, nodes, *ran):
    return Launch("j", epoch, nodes, (), ({},), pool, "place", previous_attempts=ran)


def bring(nodes, *words):
    told = []
    FileMoves(nodes).ensure_on_nodes(launch(*words), told.append)
    return told


def test_in_the_same_storage_the_folder_is_renamed_once_nothing_of_its_attempt_is_left(live, recorded):
    nodes = Nodes(live, recorded)
    nodes.wrote("cpu-0", 1, "1")
    inode = (nodes.storages["cpu-0"] / "j/output-1/who").stat().st_ino
    bring(nodes, 2, "cpu", ("cpu-0",), PreviousAttempt(1, "cpu", ("cpu-0",), started=True, is_over=True))
    assert (nodes.storages["cpu-0"] / "j/output-2/who").stat().st_ino == inode


def test_an_attempt_whose_end_nobody_saw_leaves_a_copy_and_its_late_writes_reach_nothing(live, recorded):
    nodes = Nodes(live, recorded)
    nodes.wrote("cpu-0", 1, "1")
    with (nodes.storages["cpu-0"] / "j/output-1/who").open("a") as late:
        told = bring(nodes, 2, "cpu", ("cpu-0",), PreviousAttempt(1, "cpu", ("cpu-0",), started=True, is_over=False))
        late.write("written by an attempt that was replaced")
    assert nodes.read("cpu-0", 2) == "1" and nodes.read("cpu-0", 1) is None
    assert told == ["looks for its files", "copies its files from cpu (0 of 0 MiB)"]


def test_each_node_of_a_gang_takes_what_its_own_node_rank_left(live, recorded):
    nodes = Nodes(live, recorded, "far-1", "far-2", "far-3", "far-4")
    nodes.wrote("far-1", 1, "rank 0")
    nodes.wrote("far-2", 1, "rank 1")
    before = PreviousAttempt(1, "cpu", ("far-1", "far-2"), started=True, is_over=True)
    found = FileLocator(nodes).find("j", [before])
    assert [(folder.node, folder.node_rank) for folder in found.folders] == [("far-1", 0), ("far-2", 1)]
    bring(nodes, 2, "cpu", ("far-3", "far-4"), before)
    assert [nodes.read(node, 2) for node in ("far-3", "far-4")] == ["rank 0", "rank 1"]
    assert [nodes.read(node, 1) for node in ("far-1", "far-2")] == [None, None]
    bring(nodes, 3, "xla", ("xla-0",), replace(before, epoch=2, nodes=("far-3", "far-4")))
    assert nodes.read("xla-0", 3) == "rank 0"


def test_a_copy_from_machine_to_machine_keeps_to_the_servers_limit(live, recorded):
    nodes, slept_s = Nodes(live, recorded, "far-1", "far-2"), []
    nodes.wrote("far-1", 1, "x" * (20 << 20))
    pace = RateLimit(1 << 20, now=lambda: sum(slept_s), sleep=slept_s.append)
    before = PreviousAttempt(1, "cpu", ("far-1",), started=True, is_over=True)
    FileMoves(nodes, pace).ensure_on_nodes(launch(2, "cpu", ("far-2",), before), lambda what: None)
    assert nodes.read("far-2", 2) == "x" * (20 << 20)
    assert slept_s == [8.0, 8.0]  # pieces of 8, 8 and 4 MiB


def test_a_folder_that_appears_at_an_older_attempt_s_path_does_not_count(live, recorded):
    nodes = Nodes(live, recorded)
    nodes.wrote("cpu-0", 1, "of a process that lives on")
    ran = [
        PreviousAttempt(2, "xla", ("xla-0",), started=True, is_over=True),
        PreviousAttempt(1, "cpu", ("cpu-0",), started=True, is_over=False),
    ]
    assert FileLocator(nodes).find("j", ran).folders == ()
    assert bring(nodes, 3, "cpu", ("cpu-0",), *ran) == ["looks for its files"]
    assert nodes.read("cpu-0", 3) is None


def test_a_launch_that_failed_has_taken_the_files_and_the_next_one_finds_them(live, recorded):
    nodes = Nodes(live, recorded)
    nodes.wrote("cpu-0", 2, "taken over, and nothing was started")
    ran = [
        PreviousAttempt(2, "cpu", ("cpu-0",), started=False, is_over=False),
        PreviousAttempt(1, "cpu", ("cpu-0",), started=True, is_over=True),
    ]
    bring(nodes, 3, "cpu", ("cpu-0",), *ran)
    assert nodes.read("cpu-0", 3) == "taken over, and nothing was started"


def test_a_first_attempt_asks_nobody(live, recorded):
    assert bring(Nodes(live, recorded), 1, "cpu", ("cpu-0",)) == []


def test_a_node_that_is_away_is_named_and_one_that_certainly_shares_its_storage_answers_for_it(live, recorded):
    nodes = Nodes(live, recorded, "far-1", away=("far-1",))
    nodes.wrote("far-1", 1, "1")
    ran = [PreviousAttempt(1, "cpu", ("far-1",), started=True, is_over=True)]
    found = FileLocator(nodes).find("j", ran)
    assert (found.folders, found.away) == ((), ("far-1",))
    told = str(FileLocator(nodes).away_error("j", found.away))
    assert told.startswith("the files of j are on node far-1, which has been away for 2 h: it was powered off")
    missed = FileMoves(nodes).ensure_on_nodes(launch(2, "cpu", ("cpu-0",), *ran), lambda what: None)
    assert missed == "its files on far-1 cannot be reached"
    nodes = Nodes(live, recorded, away=("cpu-0",))
    nodes.wrote("cpu-0", 1, "1")
    found = FileLocator(nodes).find("j", [PreviousAttempt(1, "cpu", ("cpu-0",), started=True, is_over=True)])
    assert [folder.pool for folder in found.folders] == ["cpu"] and found.folders[0].node != "cpu-0"


def test_what_cannot_be_brought_is_trouble_of_the_fleet_and_tried_again(live, recorded):
    nodes = Nodes(live, recorded)
    nodes.wrote("cpu-0", 1, "1")
    (nodes.storages["xla-0"] / "j").write_text("in the way")
    with pytest.raises(FleetError, match="its files could not be copied"):
        bring(nodes, 2, "xla", ("xla-0",), PreviousAttempt(1, "cpu", ("cpu-0",), started=True, is_over=True))
    assert nodes.read("cpu-0", 1) == "1"
    (nodes.storages["xla-0"] / "j").unlink()
    bring(nodes, 3, "xla", ("xla-0",), PreviousAttempt(1, "cpu", ("cpu-0",), started=True, is_over=True))
    assert nodes.read("xla-0", 3) == "1" and nodes.read("cpu-0", 1) is None


def test_a_node_that_is_silent_is_not_waited_for_where_another_sees_its_storage(live, recorded, monkeypatch):
    nodes = Nodes(live, recorded)
    nodes.wrote("cpu-0", 1, "1")
    nodes.nodes["cpu-0"] = replace(nodes.nodes["cpu-0"], last_contact_s=time.monotonic() - 60.0)
    monkeypatch.setattr(nodes._handles["cpu-0"], "actor", None)  # whoever asks it fails
    bring(nodes, 2, "xla", ("xla-0",), PreviousAttempt(1, "cpu", ("cpu-0",), started=True, is_over=False))
    assert nodes.read("xla-0", 2) == "1"

"""What a job is told to start from: trouble of the fleet is tried again, what only its user can put right ends it."""

import shutil
import time
from dataclasses import replace

import pytest

from cluster.errors import FleetError, NotFound
from orchestrator.core.controller.commands import Launch
from orchestrator.core.controller.messages import LaunchFailed
from orchestrator.runtime.agents.agents import Agents
from orchestrator.runtime.checkpoints.checkpoints import CheckpointService
from orchestrator.runtime.checkpoints.resume_source import ResumeSourceFinder
from orchestrator.runtime.controller.launch import Launcher
from orchestrator.runtime.files.data_moves import DataMoves


class Nodes(Agents):
    """The agents of the fleet, as a controller sees them for which a test has changed what it knows of their nodes."""

    def __init__(self, agents, **nodes):
        super().__init__(lambda message: None)
        self._handles, self.server_generation = agents._handles, agents.server_generation
        self.nodes = {name: node for name, node in (dict(agents.nodes) | nodes).items() if node}


def launched(live, resume_from, node="xla-0", **nodes):
    """What a launch on `node` answers that is to start from there, and is not ordered to start any rank."""
    return launcher(live, **nodes).launch(asked(resume_from, node))


def launcher(live, **nodes):
    agents = Nodes(live.service.agents, **nodes)
    checkpoints = CheckpointService(agents)
    data = DataMoves(agents, checkpoints, live.service.data)
    return Launcher(agents, live.service.code_archives, checkpoints, data)


def asked(resume_from, node="xla-0"):
    return Launch(
        "j", 1, (node,), (), ({},), node.partition("-")[0], "place", fence_is_ours=True, resume_from=resume_from
    )


def without(live, node, **changes):
    return {node: replace(live.service.agents[node], **changes)}


def test_a_node_that_has_not_reported_yet_is_waited_for(live, checkpoint):
    told = launched(live, checkpoint, **without(live, "cpu-0", facts=None))
    assert (told.kind, told.maybe_started) == ("launch", ())
    assert "no node of pool 'cpu' is up" in told.message


def test_the_only_node_of_the_pool_is_waited_for_when_it_was_lost_and_when_nobody_remembers_it(live, checkpoint):
    for nodes in (without(live, "cpu-0", lost_reason="Ray marked the node dead"), {"cpu-0": None}):
        told = launched(live, checkpoint, **nodes)
        assert told.kind == "launch" and "no node of pool 'cpu' is up" in told.message


def test_what_a_node_does_not_have_another_may_while_it_has_not_reported(live):
    told = launched(live, "cpu:nowhere", **without(live, "ipex-0", facts=None))
    assert (told.kind, told.message.partition(";")[0]) == (
        "launch",
        "checkpoint.resume_from: no checkpoint at cpu:nowhere, but ipex-0 may have it and cannot be reached now",
    )


def test_what_is_not_there_ends_the_job(live, checkpoint):
    told = launched(live, "cpu:digitz")
    assert (told.kind, told.message.partition(";")[0]) == (
        "user",
        "checkpoint.resume_from: no checkpoint at cpu:digitz",
    )


def test_a_move_that_fails_although_its_source_is_sound_is_tried_again(live, checkpoint):
    """A file lies where its folder is to be."""
    storage = live.home / "storage" / "xla"
    storage.mkdir(parents=True, exist_ok=True)
    (storage / "j").write_text("in the way")
    told = launched(live, checkpoint)
    assert isinstance(told, LaunchFailed) and told.kind == "launch", told


def test_one_that_is_damaged_ends_the_job(live, checkpoint):
    [shard] = (live.home / "storage" / "cpu").rglob("*.safetensors")
    whole = bytearray(shard.read_bytes())
    whole[-1] ^= 1
    shard.write_bytes(whole)
    told = launched(live, checkpoint)
    assert told.kind == "user" and "none of the 1 checkpoints in cpu:digits is sound" in told.message, told


def test_one_that_a_node_cannot_send_now_is_tried_again(live, checkpoint, monkeypatch):
    def away(*_):
        raise FleetError("node cpu-0 gave no answer")

    monkeypatch.setattr(type(live.fleet.agent("cpu-0")), "read_file", away)
    assert launched(live, checkpoint).kind == "launch"


def test_while_a_checkpoint_is_copied_the_launch_says_so_and_nothing_once_it_has_ended(live, checkpoint, monkeypatch):
    told, launching = [], launcher(live)

    def away(*_):
        told.append(dict(launching.activity))
        raise FleetError("node xla-0 gave no answer")

    monkeypatch.setattr(type(live.fleet.agent("xla-0")), "begin_checkpoint_upload", away)
    assert launching.launch(asked(checkpoint)).kind == "launch"
    assert (told, launching.activity) == ([{"j.1": "copies step 12 from cpu"}], {})


# -- nodes of one pool that each have a disk of their own: xla-0 is taken for a second node of pool cpu


def second_of_cpu(live, storage_id="b" * 16, **changes):
    """xla-0 as a node of pool cpu; `changes` to cpu-0, which has the checkpoint."""
    agent = live.fleet.agent("xla-0")
    agent._identity = replace(agent._identity, pool="cpu", neighbours={})
    first, second = (live.service.agents[name].facts for name in ("cpu-0", "xla-0"))
    first = {"facts": replace(first, storage_id="a" * 16)} | changes
    return without(live, "cpu-0", **first) | without(
        live, "xla-0", facts=replace(second, pool="cpu", storage_id=storage_id)
    )


def brought(live, step=12, patient=False, **nodes):
    agents = Nodes(live.service.agents, **nodes)
    told = Launch(
        "digits", 2, ("xla-0",), (), ({},), "cpu", "place", earlier_pools=("cpu",), waits_for_checkpoint=patient,
        last_checkpoint={"pool": "cpu", "path": "digits/step-000000000012", "step": step},
    )  # fmt: skip
    return ResumeSourceFinder(agents, CheckpointService(agents)).ensure_on_nodes(told, lambda what: None)


def test_a_checkpoint_on_the_disk_of_another_node_of_the_pool_is_copied_to_where_the_job_runs(live, checkpoint):
    found = brought(live, **second_of_cpu(live))
    assert (found.checkpoint["pool"], found.checkpoint["step"], found.missed) == ("cpu", 12, "")
    assert (live.home / "storage" / "xla" / found.checkpoint["path"] / "MANIFEST.json").is_file()


def test_where_nodes_share_a_storage_nothing_is_copied(live, checkpoint):
    assert brought(live, **second_of_cpu(live, "a" * 16)).checkpoint["step"] == 12
    assert not (live.home / "storage" / "xla" / "digits").exists()


def test_a_checkpoint_that_lies_on_a_lost_node_is_named_where_the_job_begins_anew(live, checkpoint):
    found = brought(live, **second_of_cpu(live, lost_reason="Ray marked the node dead"))
    assert found.checkpoint is None
    assert found.missed == "the newest checkpoint (step 12) is on cpu-0, which cannot be reached"


def test_a_job_that_waits_for_what_was_cut_off_waits_for_its_checkpoint_too(live, checkpoint):
    with pytest.raises(FleetError, match=r"is on cpu-0, .*on_disconnect is wait"):
        brought(live, patient=True, **second_of_cpu(live, lost_reason="Ray marked the node dead"))


def test_a_node_that_does_not_answer_is_not_asked_for_checkpoints(live, checkpoint):
    """Ray lists a node that is cut off as alive for a minute, and the job that ran there goes on elsewhere before."""
    found = brought(live, **second_of_cpu(live, last_contact_s=time.monotonic() - 60.0))
    assert (found.checkpoint, found.missed) == (
        None,
        "the newest checkpoint (step 12) is on cpu-0, which cannot be reached",
    )
    assert brought(live, **second_of_cpu(live, "a" * 16, last_contact_s=time.monotonic() - 60.0)).missed == ""


def test_a_copy_in_another_pool_serves_where_no_node_of_the_checkpoint_s_own_pool_is_up(live, checkpoint):
    agents = Nodes(live.service.agents)
    copy = {"pool": "cpu", "path": "digits/step-12", "step": 12, "node": "cpu-0"}
    told = Launch(
        "digits", 2, ("xla-0",), (), ({},), "xla", "place", earlier_pools=("far",),
        last_checkpoint={"pool": "far", "path": "digits/step-20", "step": 20, "node": "far-m2"}, replicas=(copy,),
    )  # fmt: skip
    found = ResumeSourceFinder(agents, CheckpointService(agents)).ensure_on_nodes(told, lambda what: None)
    assert (found.checkpoint["pool"], found.checkpoint["step"]) == ("xla", 12)
    assert found.missed == "the newest checkpoint (step 20) is in pool far, which has no node that is up"
    for waiting in (replace(told, replicas=()), replace(told, waits_for_checkpoint=True)):
        with pytest.raises(FleetError, match="which has no node that is up"):
            ResumeSourceFinder(agents, CheckpointService(agents)).ensure_on_nodes(waiting, lambda what: None)


def test_a_checkpoint_is_shown_read_verified_and_copied_from_whichever_disk_of_the_pool_has_it(live, checkpoint):
    storage = live.home / "storage"
    (storage / "xla").mkdir(parents=True, exist_ok=True)
    shutil.move(storage / "cpu" / "digits", storage / "xla" / "digits")
    checkpoints = CheckpointService(Nodes(live.service.agents, **second_of_cpu(live)))
    assert checkpoints.show("cpu:digits")["step"] == 12
    read = checkpoints.manifest("cpu:digits")
    [shard] = (storage / "xla" / "digits").rglob("*.safetensors")
    assert checkpoints.chunk(read["checkpoint"], shard.name, 0) == shard.read_bytes()[: 8 << 20]
    assert checkpoints.tool("verify", {"place": "cpu:digits"}, {}, lambda done, total: None)["ok"]
    copied = checkpoints.copy("cpu:digits", "cpu:copied")
    assert (storage / "cpu" / copied["target"].partition(":")[2] / "MANIFEST.json").is_file()
    with pytest.raises(NotFound, match=r"valid: copied/.*, digits/"):
        checkpoints.show("cpu:digitz")

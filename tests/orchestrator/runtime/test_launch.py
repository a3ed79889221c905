"""What a job is told to start from: trouble of the fleet is tried again, what only its user can put right ends it."""

from dataclasses import replace

from cluster.errors import FleetError
from orchestrator.checkpoints import Checkpoints
from orchestrator.core.commands import Launch
from orchestrator.core.messages import LaunchFailed
from orchestrator.runtime.agents import Agents
from orchestrator.runtime.launch import Launcher


class Nodes(Agents):
    """The agents of the fleet, as a controller sees them for which a test has changed what it knows of their nodes."""

    def __init__(self, agents, **nodes):
        super().__init__(lambda message: None)
        self._handles, self.generation = agents._handles, agents.generation
        self.nodes = {name: node for name, node in (dict(agents.nodes) | nodes).items() if node}


def launched(live, resume_from, node="xla-0", **nodes):
    """What a launch on `node` answers that is to start from there, and is not ordered to start any rank."""
    return launcher(live, **nodes).launch(asked(resume_from, node))


def launcher(live, **nodes):
    agents = Nodes(live.service.agents, **nodes)
    return Launcher(agents, live.service.packages, Checkpoints(agents))


def asked(resume_from, node="xla-0"):
    return Launch("j", 1, (node,), (), ({},), node.partition("-")[0], "place", fenced=True, resume_from=resume_from)


def without(live, node, **changes):
    return {node: replace(live.service.agents[node], **changes)}


def test_a_node_that_has_not_reported_yet_is_waited_for(live, checkpoint):
    told = launched(live, checkpoint, **without(live, "cpu-0", facts=None))
    assert (told.kind, told.nodes) == ("launch", ())
    assert "no node of pool 'cpu' is up" in told.message


def test_the_only_node_of_the_pool_is_waited_for_when_it_was_lost_and_when_nobody_remembers_it(live, checkpoint):
    for nodes in (without(live, "cpu-0", lost="Ray reports the node dead"), {"cpu-0": None}):
        told = launched(live, checkpoint, **nodes)
        assert told.kind == "launch" and "no node of pool 'cpu' is up" in told.message


def test_what_a_node_does_not_have_another_may_while_it_has_not_reported(live):
    told = launched(live, "cpu:nowhere", **without(live, "ipex-0", facts=None))
    assert (told.kind, told.message.partition(";")[0]) == (
        "launch",
        "checkpoint.resume_from: no checkpoint at cpu:nowhere, and ipex-0 may have it and cannot be asked now",
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
        told.append(dict(launching.doing))
        raise FleetError("node xla-0 gave no answer")

    monkeypatch.setattr(type(live.fleet.agent("xla-0")), "begin_checkpoint", away)
    assert launching.launch(asked(checkpoint)).kind == "launch"
    assert (told, launching.doing) == ([{"j.1": "copies step 12 from cpu"}], {})

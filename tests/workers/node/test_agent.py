"""The agent as the controller uses it: first as a plain object, then as a Ray actor that is killed and comes back."""

import dataclasses
import hashlib
import io
import json
import os
import time
import zipfile

import pytest
from patience import LIMIT_S, PATIENCE, wait_for

from cluster.errors import Conflict, FleetError, NotFound, UserError
from cluster.serialization import from_plain
from cluster.types import NodeFacts
from workers.node.agent import Agent
from workers.protocol import lease
from workers.protocol.messages import PROTOCOL, AttemptStatus, Order
from workers.storage.checkpoint_mirror import CheckpointMirror
from workers.storage.pool_storage import PoolStorage


def order(job="j", command=("true",), **more):
    fixed = {"epoch": 1, "task": "run", "backend": "cpu", "kind": "cpu", "emulated": False, "devices": (0,), "nodes": 1}
    ranks = {"node_rank": 0, "first_rank": 0, "ranks": 1, "world_size": 1, "lease_s": 600.0}
    meet = {"master_address": "127.0.0.1", "master_port": 29500}
    return dataclasses.asdict(Order(**(fixed | ranks | meet | {"job": job, "command": command} | more)))


@pytest.fixture
def make(tmp_path):
    agent = None

    def build():
        nonlocal agent
        agent = Agent(tmp_path / "node", tmp_path / "storage", "n0", "cpu", "cpu")
        return agent

    yield build
    if agent is not None:
        for report in agent.poll(1, {}, {}, 0.0)["reports"]:
            agent.stop(1, report["job"], report["epoch"], "cancel")
            ended(agent, report["job"], report["epoch"])


@pytest.fixture
def agent(make):
    return make()


def ended(agent, job="j", epoch=1):
    """The report of an attempt's end, reached by long polls as a controller makes them."""
    known, deadline = {}, time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for report in agent.poll(1, {}, known, 1.0)["reports"]:
            known[f"{report['job']}.{report['epoch']}.{report['node_rank']}"] = report["phase"]
            if (report["job"], report["epoch"], report["phase"]) == (job, epoch, "ended"):
                return AttemptStatus.parse(report)
    raise AssertionError(f"{job} did not end within {LIMIT_S} s: {known}")


def test_an_agent_introduces_its_node(agent, tmp_path):
    facts = from_plain(NodeFacts, json.loads(json.dumps(agent.register(1)["facts"])))
    assert (facts.node, facts.pool, facts.backend, facts.protocol) == ("n0", "cpu", "cpu", PROTOCOL)
    assert (facts.storage, facts.agent_pid, facts.ray_node_id) == (str(tmp_path / "storage"), os.getpid(), "")
    assert [d.kind for d in facts.devices] == ["cpu"]
    assert (tmp_path / "node").stat().st_mode & 0o777 == 0o700


def test_the_first_watch_tells_the_facts_and_the_next_does_not(agent):
    assert agent.poll(1, {}, {}, 0.0)["facts"]["node"] == "n0"
    told = agent.poll(1, {}, {}, 0.0)
    assert {**told, "clock_s": 0} == {
        "facts": None,
        "reports": [],
        "attempts": [],
        "unreadable_output": {},
        "clock_s": 0,
    }


def test_a_command_runs_to_its_end(agent):
    agent.start(1, order(command=("echo", "hello")), {})
    assert ended(agent).outcome.state == "succeeded"
    log = agent.logs("j", 1, 0, 0, 1000)
    assert log["data"].endswith(" out hello\n")
    assert log["ended"]


def test_the_reply_with_an_end_says_that_its_checkpoints_may_not_be_uploaded_yet(agent, tmp_path):
    """Otherwise the server could take the node for idle, and let an autoscaler remove it."""

    def run(verb, arguments, progress=None):
        return {"paths": [], "pinned": [], "rows": []}

    mirror = CheckpointMirror(PoolStorage(tmp_path / "storage"), "cpu", "s3://bucket/runs", run=run)
    agent._mirror = mirror
    mirror.upload_due()
    assert agent.poll(1, {}, {}, 0.0)["facts"]["pending_uploads"] == 0
    agent.start(1, order(), {})
    known = {}

    def reply_with_end():
        reply = agent.poll(1, {}, known, 1.0)
        known.update({f"{r['job']}.{r['epoch']}.{r['node_rank']}": r["phase"] for r in reply["reports"]})
        return reply if "ended" in known.values() else None

    assert wait_for(reply_with_end, limit_s=LIMIT_S)["facts"]["pending_uploads"] == 1
    mirror.upload_due()
    assert mirror.pending_uploads == 0


def test_an_attempt_counts_as_ended_once_nothing_of_it_runs_also_after_its_rank_folders_were_removed(agent):
    """Then its files are uploaded, if the pool has an object store."""
    agent.start(1, order(command=("sleep", "600")), {})
    assert agent._ended_attempts() == []
    agent.stop(1, "j", 1, "cancel")
    ended(agent)
    assert agent._ended_attempts() == [("j", 1)]
    agent.remove_shared_files(1, "j", 1)
    assert agent._ended_attempts() == [("j", 1)]
    agent.remove_all_files(1, [("j", 1)])
    assert agent._ended_attempts() == []


def test_a_command_given_as_text_is_run_by_a_shell(agent):
    agent.start(1, order() | {"command": "exit 7"}, {})
    assert ended(agent).outcome.exit_codes == {0: 7}


def test_a_malformed_order_is_refused_with_its_field(agent):
    with pytest.raises(UserError, match=r"the order has no `epoch`"):
        agent.start(1, order() | {"epoch": "first"}, {})


def test_an_epoch_that_is_past_is_refused(agent):
    agent.start(1, order(epoch=2), {})
    with pytest.raises(Conflict):
        agent.start(1, order(epoch=1), {})
    agent.stop(1, "j", 1, "cancel")


def test_a_watch_renews_leases_and_never_outlasts_them(agent):
    agent.start(1, order(command=("sleep", "600"), lease_s=6.0 * PATIENCE), {})
    known, deadlines_s = {"j.1.0": "starting"}, []
    while known["j.1.0"] == "starting" or len(deadlines_s) < 2:
        deadlines_s.append(lease.deadline_s(agent._identity.node_dir / "attempts/j.1.0/lease"))
        said = agent.poll(1, {}, known, 600.0)
        known |= dict(zip(said["attempts"], [r["phase"] for r in said["reports"]], strict=False))
    assert known == {"j.1.0": "running"}
    assert deadlines_s[-1] > deadlines_s[-2]


def test_an_attempt_nobody_watches_is_lost(agent):
    agent.start(1, order(command=("sleep", "600"), lease_s=1.0), {})
    path = agent._identity.node_dir / "attempts/j.1.0/outcome.json"
    wait_for(path.exists)
    assert ended(agent).outcome.state == "lost"


def test_preempt_and_forget(agent, tmp_path):
    agent.start(1, order(command=("sleep", "600")), {})
    with pytest.raises(UserError, match="has not ended"):
        agent.remove_shared_files(1, "j", 1)
    agent.stop(1, "j", 1, "preempt")
    assert ended(agent).outcome.state == "preempted"
    agent.remove_shared_files(1, "j", 1)
    agent.remove_shared_files(1, "j", 1)
    assert agent.poll(1, {}, {}, 0.0)["reports"] == []
    assert not (tmp_path / "node/shared/j.1.0").exists()


def test_a_new_agent_goes_on_where_the_old_one_stopped(agent, make):
    agent.start(1, order(command=("sh", "-c", "mkfifo gate; echo ready; cat gate")), {})
    gate = agent._identity.node_dir / "shared/j.1.0/work/0/gate"
    wait_for(gate.exists)
    second = make()
    assert [r["phase"] for r in second.poll(1, {}, {}, 1.0)["reports"]] == ["running"]
    gate.write_text("through the gate\n")
    assert ended(second).outcome.state == "succeeded"
    assert "through the gate" in second.logs("j", 1, 0, 0, 1000)["data"]


def test_a_submitted_folder_is_sent_in_pieces_and_used(agent):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as z:
        z.writestr("main.py", "print('from the package')")
    data = made.getvalue()
    sha = hashlib.sha256(data).hexdigest()
    assert not agent.has_code_archive(sha)
    agent.put_code_archive_part(sha, 0, data[:50], False)
    assert agent.arrived_code_archive(sha)["bytes"] == 50
    agent.put_code_archive_part(sha, 50, data[50:], True)
    assert agent.has_code_archive(sha)
    agent.start(1, order(command=("python", "main.py"), code_archive=sha), {})
    assert ended(agent).outcome.state == "succeeded"
    assert "from the package" in agent.logs("j", 1, 0, 0, 1000)["data"]


def test_ports_and_address_are_of_this_machine(agent):
    assert agent.address() == "127.0.0.1"
    assert 1024 <= agent.free_port() <= 65535


def test_files_of_the_storage_are_read_in_pieces(agent):
    (agent._identity.storage / "step-1").mkdir()
    (agent._identity.storage / "step-1/a").write_bytes(b"abc")
    assert agent.read_file("step-1/a", 1, 10, "cpu") == b"bc"
    with pytest.raises(UserError):
        agent.read_file("../node/attempts", 0, 1, "cpu")
    with pytest.raises(NotFound, match="pool 'xla' cannot be read from node n0"):
        agent.read_file("step-1/a", 0, 1, "xla")


@pytest.fixture
def saved(agent):
    save = pytest.importorskip("workers.checkpoint").save
    torch = pytest.importorskip("torch")
    return save(agent._identity.storage / "jobs/j", 3, {"t": {"w": torch.randn(3_000_000)}, "extra": {"n": 1}}).path


def chunks(agent, path, missing):
    for file, index in missing:
        yield file, index, agent.read_file(f"{path}/{file}", index << 23, 1 << 23)


def test_a_checkpoint_arrives_chunk_by_chunk_and_goes_on_where_it_was_cut(agent, saved):
    text, path = (saved / "MANIFEST.json").read_bytes(), f"jobs/j/{saved.name}"
    begun = agent.begin_checkpoint_upload("moved", saved.name, text)
    assert (begun["arrived"], len(begun["missing"]), begun["step"]) == (False, 2, 3)
    file, index, data = next(chunks(agent, path, begun["missing"]))
    with pytest.raises(UserError, match="chunk 1 of 2 arrived damaged"):
        agent.write_checkpoint_chunk("moved", saved.name, file, index, data[:-1] + bytes([data[-1] ^ 1]))
    assert agent.write_checkpoint_chunk("moved", saved.name, file, index, data) == 1 << 23
    with pytest.raises(Conflict, match="another copy of"):
        agent.begin_checkpoint_upload("moved", saved.name, text)
    agent.close_checkpoint_upload("moved", saved.name)
    begun = agent.begin_checkpoint_upload("moved", saved.name, text)
    assert begun["missing"] == [[file, 1]]
    for chunk in chunks(agent, path, begun["missing"]):
        agent.write_checkpoint_chunk("moved", saved.name, *chunk)
    agent.commit_checkpoint_upload("moved", saved.name)
    assert agent.verify_checkpoint(f"moved/{saved.name}")["ok"]
    assert agent.begin_checkpoint_upload("moved", saved.name, text)["arrived"]
    with pytest.raises(NotFound, match="no copy of"):
        agent.write_checkpoint_chunk("moved", saved.name, file, 0, data)


def result(agent, number):
    seen = 0
    for _ in range(200):
        news = agent.poll_tool(number, seen, 1.0)
        seen = news["seen"]
        if news["result"] is not None:
            return news["result"]
    raise AssertionError("the tool did not end")


def test_a_script_s_checkpoint_is_handed_on_before_its_attempt_starts_and_left_alone_from_then_on(agent, tmp_path):
    asked = ("state", "auto", "nvidia", 1)
    folder = tmp_path / "storage" / "j" / "output-1"
    folder.mkdir(parents=True)
    (folder / "state").write_bytes(b"PK half of a file")
    told = agent.copy_script_checkpoint("j", 1, *asked)
    assert not told["found"] and "was moved to state.torn" in told["text"]
    root = str(tmp_path / "storage" / "j")
    arguments = {"checkpoint": {"path": "state"}}
    agent.start(1, order(command=("sleep", "60"), checkpoint_root=root, arguments=arguments), {})
    (folder / "state").write_bytes(b"PK what the attempt is writing")
    assert agent.copy_script_checkpoint("j", 1, *asked) == {"found": False, "text": ""}
    assert (folder / "state").exists()
    with pytest.raises(UserError, match="checkpoint path that leads out of its folder"):
        agent.start(1, order("k", arguments={"checkpoint": {"path": "../state"}}), {})


def test_a_tool_runs_in_a_child_on_places_of_the_pool_and_nowhere_else(agent, saved):
    place = {"pool": "cpu", "path": f"jobs/j/{saved.name}"}
    there = {"pool": "cpu", "path": "narrow"}
    number = agent.start_tool("convert", {"source": place, "root": there, "to_kind": "tpu:v5e"})
    told = result(agent, number)
    assert told["path"].startswith("cpu:narrow/step-00000003-")
    with pytest.raises(NotFound, match="this operation does not run"):
        agent.poll_tool(number, 0, 0.1)
    assert result(agent, agent.start_tool("verify", {"place": place}))["ok"]
    for wrong, said in [
        ({"pool": "xla", "path": "x"}, "cannot be read"),
        ({"pool": "cpu", "path": "../x"}, "not a path below"),
        ({"uri": "file:///etc"}, "an object store"),
        ({"uri": "/etc"}, "an object store"),
    ]:
        with pytest.raises(UserError, match=said):
            agent.start_tool("verify", {"place": wrong})
    number = agent.start_tool("diff", {"a": place, "b": place, "strange": 1})
    with pytest.raises(FleetError, match="`diff` exited without a result"):
        result(agent, number)


def test_checkpoints_are_found_described_and_verified_by_their_path_in_the_storage(agent):
    save = pytest.importorskip("workers.checkpoint").save
    torch = pytest.importorskip("torch")
    state = {"model": {"w": torch.arange(4.0)}}
    for step in (1, 2):
        save(agent._identity.storage / "jobs/j", step, state)
    rows = agent.checkpoints("jobs")
    assert sorted(row["step"] for row in rows) == [1, 2]
    newest = agent.resolve_checkpoint("jobs/j")["path"]
    assert newest in [row["path"] for row in rows]
    assert agent.resolve_checkpoint(newest)["path"] == newest
    assert agent.describe_checkpoint(newest)["step"] == 2
    assert agent.verify_checkpoint(newest)["ok"]
    assert agent.plan_checkpoint(newest, "tpu:emulated", 1)["ok"]


def test_a_damaged_checkpoint_does_not_verify(agent):
    save = pytest.importorskip("workers.checkpoint").save
    torch = pytest.importorskip("torch")
    save(agent._identity.storage / "j", 1, {"model": {"w": torch.arange(4.0)}})
    path = agent.resolve_checkpoint("j")["path"]
    shard = next((agent._identity.storage / path).glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(UserError):
        agent.verify_checkpoint(path)


def test_a_folder_without_checkpoints_has_none(agent):
    assert agent.checkpoints("nothing/here") == []
    assert agent.resolve_checkpoint("nothing/here") == {"path": "", "passed_over": []}
    with pytest.raises(NotFound):
        agent.describe_checkpoint("nothing/here")

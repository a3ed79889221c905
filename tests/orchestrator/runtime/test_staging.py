"""Pools whose storage is an object store, as the server serves them: real files of nodes, and fsspec's store in memory.

Ray is recorded: a call is made in this process. So tools run here, too, because a child would have a memory of its own.
"""

import shutil
from dataclasses import replace

import fsspec
import pytest
from memory_store import memory_store
from recorded_agents import RecordedAgents

from cluster.errors import NotFound
from cluster.serialization import from_plain
from cluster.types import NodeFacts
from orchestrator.core.controller.commands import Launch
from orchestrator.runtime.agents import actors
from orchestrator.runtime.checkpoints.checkpoints import CheckpointService
from orchestrator.runtime.checkpoints.resume_source import ResumeSourceFinder
from workers.checkpoint.tools import run
from workers.node.node_facts import node_identity
from workers.node.node_files import NodeFiles
from workers.storage import checkpoint_mirror, checkpoint_tools

URI = "memory://bucket/runs"
KEEP = {"j": 2}


class Files(NodeFiles):
    """The files of a node. Its tools run in this process."""

    def start_tool(self, verb, arguments):
        locations = checkpoint_tools.TOOLS[verb].locations
        resolved = {k: self._tools._resolve(verb, k, v, {}) if k in locations else v for k, v in arguments.items()}
        self.result = run(verb, resolved)
        return "1"

    def poll_tool(self, number, cursor, timeout_s):
        return {"progress": None, "seen": 0, "result": self.result}

    def _checkpoints_to_keep(self, job):
        return KEEP.get(job)


@pytest.fixture
def fleet(monkeypatch, tmp_path, recorded):
    """Nodes a and b of pool s3, whose storage is the store, and c of pool disk. Each has a disk of its own."""
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(checkpoint_tools.checkpoint_location, "SCHEMES", ("memory",))
    monkeypatch.setattr(checkpoint_tools.checkpoint_location, "BUCKET", checkpoint_tools.checkpoint_location.POOL)
    monkeypatch.setattr(actors, "get_result", lambda result, what, timeout_s: result)
    monkeypatch.setattr(checkpoint_mirror.CheckpointMirror.__init__, "__defaults__", (KEEP.get, run))
    monkeypatch.setitem(KEEP, "j", 2)
    facts, nodes = from_plain(NodeFacts, recorded.RECORDED[0]), {}
    for name, pool, uri in (("a", "s3", URI), ("b", "s3", URI), ("c", "disk", "")):
        identity = node_identity(name, pool, "cpu", tmp_path / "nodes" / name, tmp_path / "disks" / name)
        own = replace(facts, node=name, host=name, pool=pool, storage_id=name, object_store=uri, neighbours=())
        nodes[name] = own, Files(replace(identity, object_store=uri))
    with memory_store(monkeypatch):
        yield RecordedAgents(nodes)


@pytest.fixture
def save(fleet, tmp_path):
    save = pytest.importorskip("workers.checkpoint").save
    torch = pytest.importorskip("torch")

    def save_on(node, step):
        state = {"t": {"w": torch.full((3_000_000,), float(step))}}
        path = save(fleet.files[node]._storage.make_folder("j"), step, state).path
        fleet.files[node]._mirror.upload_due()
        return f"j/{path.name}"

    return save_on


def resume(fleet, node, pool="s3", step=9):
    launch = Launch("j", 2, (node,), (), ({},), pool, "place", earlier_pools=("s3",),
                    last_checkpoint={"pool": "s3", "path": "j/x", "step": step})  # fmt: skip
    return ResumeSourceFinder(fleet, CheckpointService(fleet)).ensure_on_nodes(launch, lambda what: None)


def read(files, path):
    return {p.name: p.read_bytes() for p in files._storage.resolve(path).iterdir() if not p.name.startswith(".")}


def test_a_job_resumes_on_another_node_of_the_pool_after_the_first_was_lost_with_its_disk(fleet, save, tmp_path):
    path = save("a", 9)
    saved = read(fleet.files["a"], path)
    fleet.lose("a")
    shutil.rmtree(tmp_path / "disks/a")
    found = resume(fleet, "b")
    assert (found.checkpoint, found.missed) == ({"pool": "s3", "path": path, "step": 9}, "")
    assert read(fleet.files["b"], path) == saved


def test_a_job_resumes_in_a_pool_with_a_disk_from_what_is_only_in_the_store(fleet, save):
    path = save("a", 9)
    saved = read(fleet.files["a"], path)
    fleet.lose("a")
    assert resume(fleet, "c", "disk").checkpoint == {"pool": "disk", "path": path, "step": 9}
    assert read(fleet.files["c"], path) == saved


def test_what_is_damaged_in_the_store_is_passed_over_for_the_one_before_it(fleet, save):
    old, new = save("a", 8), save("a", 9)
    fleet.lose("a")
    files = fsspec.filesystem("memory")
    shard = next(name for name in files.store if new in name and "shard" in name)
    files.pipe({shard: bytes(len(files.cat_file(shard)))})
    assert resume(fleet, "b").checkpoint == {"pool": "s3", "path": old, "step": 8}


def test_checkpoints_of_the_store_are_listed_once_shown_planned_and_verified_there(fleet, save):
    path, service = save("a", 9), CheckpointService(fleet)
    assert [(row["path"], row["nodes"]) for row in service.list("s3")] == [(path, ["a", "b"])]
    fleet.lose("a")
    assert service.show("s3:j")["step"] == 9 and service.plan("s3:j", "tpu:v5e")["step"] == 9
    verified = service.tool("verify", {"place": "s3:j"}, {}, lambda done, total: None)
    assert verified["ok"] and verified["ref"] == f"s3:{path}"


def test_a_copy_from_the_store_and_one_to_it_arrive(fleet, save):
    path, service = save("a", 9), CheckpointService(fleet)
    saved, name = read(fleet.files["a"], path), path.rpartition("/")[2]
    fleet.lose("a")
    service.copy("s3:j", "disk:moved")
    assert read(fleet.files["c"], f"moved/{name}") == saved
    service.copy("disk:moved", "s3:returned")
    fleet.files["b"]._mirror.upload_due()
    assert fsspec.filesystem("memory").exists(f"/bucket/runs/returned/{name}/MANIFEST.json")


def test_a_client_reads_what_is_only_in_the_store(fleet, save):
    path, service = save("a", 9), CheckpointService(fleet)
    saved = read(fleet.files["a"], path)
    fleet.lose("a")
    reply = service.manifest("s3:j")
    assert reply == {"checkpoint": f"s3:{path}", "manifest": saved["MANIFEST.json"]}
    shard = next(name for name in saved if name.startswith("shard"))
    assert service.chunk(reply["checkpoint"], shard, 0) == saved[shard][: 8 << 20]


def no_progress(done, total):
    pass


def in_store(path):
    return fsspec.filesystem("memory").exists(f"/bucket/runs/{path}/MANIFEST.json")


def test_prune_deletes_in_the_store_and_then_the_copies_of_all_nodes_but_not_what_is_pinned(fleet, save):
    service = CheckpointService(fleet)
    KEEP["j"] = 9
    paths = [save("a", step) for step in (1, 2, 3, 4)]
    resume(fleet, "b", step=4)
    first, newest = paths[0], paths[-1]
    pinned = service.tool("pin", {"path": f"s3:{first}"}, {"remove": False}, no_progress)
    assert pinned == {"pinned": True, "path": first, "pool": "s3", "ref": f"s3:{first}"}
    assert [row["pinned"] for row in service.list("s3")] == [False, False, False, True]
    asked = {"keep": 1, "dry_run": True}
    planned = service.tool("prune", {"root": "s3:j"}, asked, no_progress)
    assert len(service.list("s3")) == 4, "a dry run deletes nothing"
    result = service.tool("prune", {"root": "s3:j"}, {"keep": 1, "dry_run": False}, no_progress)
    assert result == planned | {"dry_run": False} and result["root"] == "s3:j"
    assert sorted(result["deleted"]) == [path.removeprefix("j/") for path in paths[1:3]]
    assert [row["path"] for row in service.list("s3")] == [newest, first]
    assert [in_store(path) for path in paths] == [True, False, False, True]
    assert [fleet.files["a"]._storage.exists(path) for path in paths] == [True, False, False, True]
    service.tool("pin", {"path": f"s3:{first}"}, {"remove": True}, no_progress)
    service.tool("prune", {"root": "s3:j"}, {"keep": 1, "dry_run": False}, no_progress)
    assert [row["path"] for row in service.list("s3")] == [newest]


def test_a_pin_protects_what_is_only_in_the_store(fleet, save):
    path, service = save("a", 9), CheckpointService(fleet)
    fleet.lose("a")
    service.tool("pin", {"path": "s3:j"}, {"remove": False}, no_progress)
    assert [(row["path"], row["pinned"]) for row in service.list("s3")] == [(path, True)]
    assert service.show("s3:j")["pinned"] and not fleet.files["b"]._storage.exists(path), "nothing was downloaded"


def test_prune_leaves_what_was_not_uploaded_and_what_is_on_a_node_that_is_away(fleet, save):
    service = CheckpointService(fleet)
    old, new = save("b", 1), save("b", 2)
    folder = fleet.files["a"]._storage.make_folder("j")
    pytest.importorskip("workers.checkpoint").save(folder, 3, {"t": {"w": pytest.importorskip("torch").ones(3)}})
    away = fleet.files.pop("b")
    service.tool("prune", {"root": "s3:j"}, {"keep": 1, "dry_run": False}, no_progress)
    assert not in_store(old) and in_store(new)
    assert away._storage.exists(old) and [row["step"] for row in fleet.files["a"].checkpoints("j")] == [3, 2]
    fleet.files["b"] = away
    service.tool("prune", {"root": "s3:j"}, {"keep": 1, "dry_run": False}, no_progress)
    assert not away._storage.exists(old), "the next call removes the copy"


def test_a_checkpoint_that_is_nowhere_is_not_found(fleet, save):
    save("a", 9)
    with pytest.raises(NotFound, match="no checkpoint at s3:absent"):
        CheckpointService(fleet).show("s3:absent")

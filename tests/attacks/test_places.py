"""A place is POOL:PATH or an object store's URI. What is neither is refused by the server and again by the node: it is
never a path below wherever a process stands."""

import time
from pathlib import Path

import pytest
from patience import LIMIT_S

from cluster.errors import FleetError, NotFound, SpecError, UserError
from cluster.input import checkpoint_location
from cluster.input.checkpoint_location import CheckpointLocation
from orchestrator.runtime.agents.agents import Agents
from orchestrator.runtime.checkpoints import checkpoint_copy
from orchestrator.runtime.checkpoints.checkpoints import CheckpointService
from orchestrator.spec.checkpoint_address import is_local
from orchestrator.spec.job_spec import parse_job
from workers.attempt.folder_setup import resolve_paths
from workers.checkpoint.tool_table import TOOLS
from workers.checkpoint.tools import run
from workers.checkpoint.transfer.stores import store
from workers.protocol.messages import Order
from workers.storage.checkpoint_tools import CheckpointTools
from workers.storage.pool_storage import PoolStorage

NO_STORE = (
    "x://y", "x://../../etc", "file:///etc/passwd", "memory://a/b", "http://169.254.169.254/latest/meta-data",
    "https://example.org/x", "ftp://example.org/x", "local://x", "simplecache::file:///etc/passwd", "S3://bucket/x",
    "simplecache::s3://bucket/x", "zip://a.zip::s3://bucket/x", "filecache::http://localhost/", "://x", "s3s3://b/x",
    "s3://", "s3:///etc/passwd", "s3://bucket/../other", "s3://bucket/a/./b", "s3://bucket//a", "s3://key@bucket/x",
    "s3://key:hunter2@bucket/x", "s3://bucket/x?sig=hunter2", "s3://bucket/x#y", "s3://bucket/*", "s3://bucket/[ab]",
    "s3://bucket/a\\..\\b", "s3://bucket/a\nb", "s3://bucket/a\x00b", "s3://169.254.169.254/x", "s3://localhost/x",
    "s3://bucket/file:///etc", "s3://bucket::zip/x", "s3://b\u00fccket/x", "az://user@host/x", "s3://bucket/\u2028",
    f"s3://bucket/{'x' * 2000}",
)  # fmt: skip
NO_PATH = (
    "cpu:", "cpu:/etc/passwd", "cpu:../x", "cpu:a/../../x", "cpu:..", "cpu:.", "cpu:a\\..\\b", "cpu:a\0b", "cpu:a\nb",
    "cpu:\x1b[2J", "cpu:\ud800", "cpu:a\u2028b", ":a", "c u:a", "../x:a", "/etc:a", f"cpu:{'a/' * 100}b",
    f"cpu:{'x' * 300}",
)  # fmt: skip


@pytest.mark.parametrize("text", (*NO_STORE, *NO_PATH, "", "path", "/etc/passwd"))
def test_what_is_no_place_is_refused_with_the_field_and_a_form_that_is_one(text):
    with pytest.raises(SpecError) as raised:
        checkpoint_location.parse_location(text, "target")
    assert raised.value.field == "target" and raised.value.remedy
    assert "hunter2" not in str(raised.value)
    assert "\n" not in str(raised.value) and "\x1b" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("cpu:digits-3f9a2c", CheckpointLocation("cpu", "digits-3f9a2c")),
        ("cpu:digits/step-00000200-0a1b2c3d/", CheckpointLocation("cpu", "digits/step-00000200-0a1b2c3d")),
        ("cpu:./a//b", CheckpointLocation("cpu", "a/b")),
        ("cpu:a:b=c,d@e %\u00e9", CheckpointLocation("cpu", "a:b=c,d@e %\u00e9")),
        ("My.Pool_1:a", CheckpointLocation("My.Pool_1", "a")),
        ("s3://bucket/runs/digits/", CheckpointLocation("", "bucket/runs/digits", "s3")),
        ("gs://my-bucket.example.org", CheckpointLocation("", "my-bucket.example.org", "gs")),
        ("az://container/a=b/c d", CheckpointLocation("", "container/a=b/c d", "az")),
    ],
)
def test_places_are_read_in_their_plain_form(text, place):
    assert checkpoint_location.parse_location(text) == place
    assert checkpoint_location.parse_location(str(place)) == place


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("S3://bucket/x", "did you mean 's3'"),
        ("s3s://bucket/x", "did you mean 's3'"),
        ("cpu:/data/run", "cpu:data/run"),
        ("cpu:../run", "cpu:run"),
    ],
)
def test_the_remedy_names_what_was_probably_meant(text, remedy):
    with pytest.raises(SpecError) as raised:
        checkpoint_location.parse_location(text)
    assert remedy in raised.value.remedy


# -- the server


@pytest.fixture
def server():
    return CheckpointService(Agents(lambda node, answer: None))


@pytest.mark.parametrize("verb", ["verify", "diff", "convert", "prune", "pin", "import", "export"])
@pytest.mark.parametrize("text", ["x://y", "file:///etc", "cpu:../x", "simplecache::file:///etc/passwd"])
def test_the_server_refuses_each_tools_place_before_it_asks_a_node(server, verb, text):
    locations = dict.fromkeys(TOOLS[verb].locations, text)
    with pytest.raises(SpecError) as raised:
        server.tool(verb, locations, {}, lambda done, total: None)
    assert raised.value.field == next(iter(locations))


@pytest.mark.parametrize("verb", ["diff", "convert", "prune", "pin", "import", "export"])
def test_tools_that_read_and_write_folders_take_no_store(server, verb):
    """They would take its URI for a path: `s3:` below their working directory."""
    locations = dict.fromkeys(TOOLS[verb].locations, "s3://bucket/x")
    with pytest.raises(SpecError, match="is not in a pool's storage"):
        server.tool(verb, locations, {}, lambda done, total: None)


@pytest.mark.parametrize("side", ["source", "target"])
def test_copies_are_refused_at_either_end(server, side):
    ends = {"source": "cpu:a", "target": "cpu:b", side: "x://../../etc"}
    with pytest.raises(SpecError) as raised:
        checkpoint_copy.copy(server, checkpoint_copy.CopyRequest(**ends), lambda done, total: None)
    assert raised.value.field == side


@pytest.mark.parametrize("text", ["x://y", "p:../x", "../x", "/etc", "p:/etc", "p:a\nb", "s3://bucket/x", "p:a\\b"])
def test_a_job_cannot_resume_from_what_is_no_place(text):
    with pytest.raises(SpecError, match=r"checkpoint\.resume_from: is not a checkpoint"):
        parse_job({"entry": "model:train", "checkpoint": {"resume_from": text}})


@pytest.mark.parametrize("text", ["x://y", "file:///etc", "http://example.org/x", "s3://u:p@bucket/x"])
def test_the_command_line_refuses_before_it_reads_a_path_of_that_name(text):
    with pytest.raises(SpecError, match="place: "):
        is_local(text)


# -- the node


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Of a node whose working directory has a folder `x:`, as an attacker would like it."""
    for folder in ("cwd/x:", "cwd/s3:", "outside"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "cwd")
    storage = PoolStorage(tmp_path / "storage")

    def readable(pool):
        if pool != "cpu":
            raise NotFound(f"pool {pool!r} cannot be read")
        return storage

    return CheckpointTools(storage, "cpu", readable)


def ended(tools, number):
    deadline, cursor = time.monotonic() + LIMIT_S, 0
    while time.monotonic() < deadline:
        reply = tools.poll(number, cursor, 1.0)
        cursor = reply["seen"]
        if reply["result"] is not None:
            return reply["result"]
    raise AssertionError("the tool did not end")


@pytest.mark.parametrize("scheme", ["x:", "s3:"])
def test_a_node_reads_and_writes_nothing_beside_its_storage_whatever_the_server_asks(tools, tmp_path, scheme):
    save = pytest.importorskip("workers.checkpoint").save
    torch = pytest.importorskip("torch")
    saved = save(tmp_path / "outside", 1, {"w": torch.ones(2)})
    source, root = f"{scheme}//../../outside/{Path(saved.path).name}", f"{scheme}//../../written"
    with pytest.raises(UserError):
        ended(tools, tools.start("convert", {"source": {"uri": source}, "root": {"uri": root}}))
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize(
    "value", ["/etc", "x://y", {"uri": "/etc"}, {"uri": "x://y"}, {"uri": "file:///etc"}, {}, None]
)
@pytest.mark.parametrize("verb", ["verify", "pin"])
def test_a_nodes_own_paths_are_nobodys_to_name_from_afar(tools, verb, value):
    with pytest.raises(UserError):
        tools.start(verb, dict.fromkeys(TOOLS[verb].locations, value))


@pytest.mark.parametrize("place", [{"pool": "cpu", "path": "../x"}, {"pool": "cpu", "path": "/etc"}])
def test_a_new_place_lies_in_the_storage_too(tools, tmp_path, place):
    (tmp_path / "storage/a").mkdir()
    with pytest.raises(UserError, match="not a path below"):
        tools.start("export", {"source": {"pool": "cpu", "path": "a"}, "target": place})


@pytest.mark.parametrize("verb", ["list", "show", "plan", "nonsense", "__class__"])
def test_a_node_runs_only_tools_whose_places_it_knows(tools, verb):
    """`list` and `show` take plain paths: they are for the command line on its own machine."""
    with pytest.raises(UserError, match="runs on a node"):
        tools.start(verb, {"root": "/etc", "path": "/etc"})


def test_another_pools_storage_is_not_written_whatever_is_said_about_it(tools):
    with pytest.raises(UserError, match="cannot be written from this node"):
        tools.start("prune", {"root": {"pool": "other", "path": "a"}, "keep": 1})


@pytest.mark.parametrize("text", [t for t in NO_STORE if "://" in t and not t.startswith("memory:")])
def test_the_library_that_reaches_stores_takes_no_other_place(text):
    with pytest.raises(UserError):
        store(text)


def test_a_tool_on_this_machine_takes_no_store_for_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="works on folders"):
        run("prune", {"root": "s3://bucket/x", "keep": 1})


@pytest.mark.parametrize("path", ["../x", "/etc", "a/../../x", "a\0b", "a/./b"])
@pytest.mark.parametrize("field", ["checkpoint_root", "resume_from"])
def test_an_orders_folders_lie_in_the_storage(tmp_path, path, field):
    numbers = dict.fromkeys(("node_rank", "first_rank", "master_port"), 0) | {"nodes": 1, "ranks": 1, "world_size": 1}
    device = {"backend": "cpu", "kind": "cpu", "emulated": False, "devices": (0,), "master_address": ""}
    order = Order(job="j", epoch=1, task="run", **numbers, **device, **{field: path})
    with pytest.raises(UserError, match="is not below this pool's storage"):
        resolve_paths(order, tmp_path)


def test_a_storage_that_is_gone_or_a_link_is_the_fleets_error_with_its_path(tmp_path):
    storage = PoolStorage(tmp_path / "storage")
    storage.root.rename(tmp_path / "moved")
    (tmp_path / "storage").symlink_to(tmp_path / "moved")
    with pytest.raises(FleetError, match=r"this pool's storage .* cannot be opened"):
        storage.resolve("a")


@pytest.mark.parametrize(("offset", "limit"), [(-1, 1), (1 << 70, 1), (0, -1)])
def test_numbers_beyond_a_file_are_the_users_error(tmp_path, offset, limit):
    storage = PoolStorage(tmp_path / "storage")
    (storage.root / "a").write_text("x")
    with pytest.raises(UserError):
        storage.read("a", offset, limit)

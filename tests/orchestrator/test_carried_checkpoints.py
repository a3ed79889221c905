"""Checkpoints between this machine and a pool: copied, cut off and gone on with, imported; nothing half arrives."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from patience import wait_for

from cluster.errors import FleetError, UserError
from orchestrator.cli.terminal.errors import print_error
from orchestrator.client import checkpoint_transfer
from orchestrator.client import client as http
from orchestrator.client.checkpoint_tools import CheckpointTools
from orchestrator.python_api.checkpoints import Checkpoints
from workers.checkpoint.tools import run_in_child

CHUNK = checkpoint_transfer.CHUNK_BYTES


@pytest.fixture
def client(live):
    with http.connect(start=False) as client:
        yield client


@pytest.fixture
def large(tmp_path):
    """A checkpoint of three chunks and a bit, imported here from a file of safetensors."""
    import numpy
    from safetensors.numpy import save_file

    (tmp_path / "src").mkdir()
    numbers = numpy.random.default_rng(1).integers(0, 255, 3 * CHUNK + 4096, dtype=numpy.uint8)
    save_file({"w": numbers}, tmp_path / "src/model.safetensors")
    run_in_child(
        "import", {"source": str(tmp_path / "src/model.safetensors"), "root": str(tmp_path / "here"), "step": 7}
    )
    [folder] = (tmp_path / "here").glob("step-*")
    return folder


def begin(client, place, name, manifest):
    return client.checkpoints.begin_upload(place["node"], place["folder"], name, manifest)


def seen(progress):
    return lambda done, total: progress.append((done, total))


class Cut(Exception):
    pass


def cut(done, total):
    if done < total:
        raise Cut


def test_a_checkpoint_goes_to_a_pool_and_comes_home_and_nothing_travels_twice(client, live, large, tmp_path):
    up, down = [], []
    told = checkpoint_transfer.upload_checkpoint(client, str(large.parent), "xla:sent", seen(up))
    assert told["target"] == f"xla:sent/{large.name}" and told["transferred_bytes"] == told["bytes"] == up[-1][0]
    assert client.checkpoints.verify("xla:sent")["ok"]
    assert checkpoint_transfer.upload_checkpoint(client, str(large), "xla:sent", seen(up))["already_there"]
    back = checkpoint_transfer.download_checkpoint(client, "xla:sent", str(tmp_path / "back"), seen(down))
    assert back["transferred_bytes"] == back["bytes"] == down[-1][0]
    assert run_in_child("check", {"path": back["target"]})["ok"]
    again = checkpoint_transfer.download_checkpoint(client, "xla:sent", str(tmp_path / "back"), seen(down))
    assert again["already_there"] and again["transferred_bytes"] == 0


def test_a_copy_that_was_cut_leaves_nothing_that_counts_and_goes_on_where_it_was(
    client, live, large, tmp_path, monkeypatch
):
    monkeypatch.setattr(checkpoint_transfer, "MAX_PARALLEL", 1)
    with pytest.raises(Cut):
        checkpoint_transfer.upload_checkpoint(client, str(large), "xla:sent", cut)
    assert client.checkpoints.list(pool="xla") == []
    progress = []
    told = checkpoint_transfer.upload_checkpoint(client, str(large), "xla:sent", seen(progress))
    assert 0 < told["transferred_bytes"] < told["bytes"] == progress[-1][0]
    with pytest.raises(Cut):
        checkpoint_transfer.download_checkpoint(client, "xla:sent", str(tmp_path / "back"), cut)
    assert list((tmp_path / "back").glob("step-*")) == []
    told = checkpoint_transfer.download_checkpoint(client, "xla:sent", str(tmp_path / "back"), seen(progress))
    assert 0 < told["transferred_bytes"] < told["bytes"]
    assert run_in_child("check", {"path": told["target"]})["ok"]


def test_a_chunk_that_is_not_what_the_manifest_says_is_refused_on_arrival(client, live, large, tmp_path):
    [shard] = large.glob("*.safetensors")
    copy = tmp_path / "broken" / large.name
    shutil.copytree(large, copy)
    whole = bytearray((copy / shard.name).read_bytes())
    whole[-1] ^= 1
    (copy / shard.name).write_bytes(whole)
    with pytest.raises(UserError, match="arrived damaged"):
        checkpoint_transfer.upload_checkpoint(client, str(copy), "xla:sent", seen([]))
    assert client.checkpoints.list(pool="xla") == []


def test_what_a_client_names_cannot_leave_the_storage_or_the_checkpoint(client, live, large):
    place = client.checkpoints.destination("xla:sent")
    text = (large / "MANIFEST.json").read_bytes()
    for name in ("../evil", "step-00000007-abcdef01/../x", "x"):
        with pytest.raises(UserError, match="is not a checkpoint's name"):
            begin(client, place, name, text)
    with pytest.raises(UserError, match="is not a path below"):
        begin(client, place | {"folder": "../x"}, large.name, text)
    begin(client, place, large.name, text)
    for file, index in (("../../x", 0), ("MANIFEST.json", 0), ("data-00001.safetensors", 10**9)):
        with pytest.raises(UserError, match="has no chunk"):
            client.checkpoints.send_chunk(place["node"], place["folder"], large.name, file, index, b"x")
    with pytest.raises(UserError):
        client.checkpoints.read_chunk("xla:sent", "../../../token", 0)


def test_a_full_disk_is_reported_with_the_file_and_not_with_our_home(capsys):
    with pytest.raises(OSError, match="No space left") as failure:
        checkpoint_transfer._write(Path("/dev"), ("full", 0), b"x")
    assert print_error(failure.value) == FleetError.exit_code
    message, remedy = capsys.readouterr().err.splitlines()
    assert message == "error: /dev/full cannot be written: No space left on device"
    assert remedy == "  free disk space, or name a target on another disk"


def test_a_checkpoint_of_this_machine_has_no_pool_and_its_path_is_its_reference(large):
    def no_server(start=True):
        raise FleetError("no server is running")

    tools, path = CheckpointTools(no_server, seen([])), str(large)
    [listed] = tools.run_locally("list", {"root": str(large.parent)})
    for view in (listed, tools.show(path), tools.run("verify", {"place": path})):
        assert (view["pool"], view["path"], view["ref"]) == ("", path, path)
    for ref in (path, str(large.parent)):  # of a folder, the newest in it
        assert tools.plan(ref, "tpu:v5e", 1)["bytes"] == listed["bytes"]


def test_a_manifest_that_cannot_be_believed_makes_nothing(client, live, large):
    place = client.checkpoints.destination("xla:sent")
    with pytest.raises(UserError):
        begin(client, place, large.name, b'{"version": 1}')
    assert client.checkpoints.list(pool="xla") == []


def test_a_file_of_this_machine_is_imported_into_a_pool(client, live, large, tmp_path):
    source = str(tmp_path / "src/model.safetensors")
    told = checkpoint_transfer.import_local(client, source, "xla:brought", {"step": 3}, seen([]))
    assert told["ref"].startswith("xla:brought/step-00000003-") and told["transferred_bytes"] > 3 * CHUNK
    assert client.checkpoints.verify(told["ref"])["ok"]
    assert client.checkpoints.show("xla:brought")["step"] == 3
    assert list((live.home / "storage/xla/.uploads").glob("[!.]*")) == []


def test_a_folder_of_links_is_sent_as_the_files_behind_them_and_a_link_to_nothing_is_refused(
    client, live, large, tmp_path
):
    cache = tmp_path / "snapshot"
    cache.mkdir()
    (cache / "model.safetensors").symlink_to(tmp_path / "src/model.safetensors")
    (tmp_path / "latest").symlink_to(cache)
    for source in (cache, tmp_path / "latest", cache / "model.safetensors"):
        told = checkpoint_transfer.import_local(client, str(source), "xla:brought", {"step": 3}, seen([]))
        assert told["bytes"] == client.checkpoints.show("xla:brought")["bytes"]
    (cache / "config.json").symlink_to("../blobs/gone")
    with pytest.raises(UserError, match=r"config\.json cannot be sent: it is a link to \.\./blobs/gone"):
        checkpoint_transfer.import_local(client, str(cache), "xla:brought", {}, seen([]))


def test_a_checkpoint_of_links_goes_to_a_pool(client, live, large, tmp_path):
    moved = tmp_path / "other-disk"
    large.rename(moved)
    large.mkdir()
    for file in moved.iterdir():
        (large / file.name).symlink_to(file)
    told = checkpoint_transfer.upload_checkpoint(client, str(large), "xla:linked", seen([]))
    assert told["transferred_bytes"] == told["bytes"]
    assert client.checkpoints.verify("xla:linked")["ok"]


def test_python_copies_imports_and_exports_in_the_words_of_the_command_line(client, live, large, tmp_path):
    o, seen_bytes = Checkpoints(client), []
    told = o.copy(str(large), "xla:python", progress=seen(seen_bytes))
    assert told["target"] == f"xla:python/{large.name}" and seen_bytes[-1][0] == told["bytes"]
    back = o.copy("xla:python", str(tmp_path / "home"))
    assert o.verify(back["target"])["ok"] and o.show(back["target"])["step"] == 7
    assert o.diff(str(large), back["target"])["same"]
    source = str(tmp_path / "src/model.safetensors")
    assert o.import_(source, "xla:imported", step=3)["ref"].startswith("xla:imported/step-00000003-")
    assert o.import_(source, str(tmp_path / "here-too"), step=4)["step"] == 4
    o.export("xla:imported", "xla:exported.safetensors")
    with pytest.raises(UserError, match="cannot be converted"):
        o.copy(str(large), "xla:python", to_kind="tpu:v5e")
    with pytest.raises(UserError, match=r"is on this machine, and .* is in a pool"):
        o.diff(str(large), "xla:python")


def test_what_is_no_checkpoint_is_refused_and_imports_nothing(client, live, tmp_path):
    (tmp_path / "x.pt").write_bytes(b"no checkpoint")
    (tmp_path / "run/iter_0000001/mp_rank_00").mkdir(parents=True)
    (tmp_path / "run/iter_0000001/mp_rank_00/model_optim_rng.pt").touch()
    for source, names in (("x.pt", 1), ("run", 2)):
        with pytest.raises(UserError) as error:
            checkpoint_transfer.import_local(client, str(tmp_path / source), "xla:brought", {}, seen([]))
        assert str(error.value).count(str(tmp_path / source)) == names and ".uploads" not in str(error.value)
        wait_for(lambda: not any((live.home / "storage/xla/.uploads").iterdir()), "what was sent is removed")
    assert client.checkpoints.list(pool="xla") == []
    with pytest.raises(UserError, match="no checkpoint at"):
        checkpoint_transfer.upload_checkpoint(client, str(tmp_path), "xla:x", seen([]))


def test_two_imports_of_one_file_at_once_both_arrive(client, live, large, tmp_path):
    """They share an upload, which the first to end discards: the second waits, and says for what."""
    source, second, messages = tmp_path / "src/model.safetensors", [], []

    def bring(step, progress):
        with http.connect(start=False, progress=messages.append) as own:
            return checkpoint_transfer.import_local(own, str(source), "xla:twice", {"step": step}, progress)

    with ThreadPoolExecutor(1) as other:

        def begin_the_second(done, total):
            if not second:
                second.append(other.submit(bring, 2, seen([])))
                wait_for(lambda: messages or second[0].done())

        first = bring(1, begin_the_second)
        assert (first["step"], second[0].result()["step"]) == (1, 2)
    assert {row["step"] for row in client.checkpoints.list(pool="xla")} == {1, 2}
    assert messages == [f"another import of {source} is running; this one starts after it"]


def test_the_commands_copy_both_ways_and_import(here, live, large, tmp_path):
    done = here("checkpoint", "copy", str(large.parent), "xla:sent", "-o", "json")
    assert (done.returncode, json.loads(done.stdout)["verified"]) == (0, True), done
    done = here("checkpoint", "copy", "xla:sent", str(tmp_path / "home"), "-o", "json")
    assert (done.returncode, json.loads(done.stdout)["step"]) == (0, 7), done
    done = here("checkpoint", "import", str(tmp_path / "src/model.safetensors"), "xla:in")
    assert done.returncode == 0 and "xla:in/step-" in done.stdout, done
    done = here("checkpoint", "copy", "xla:sent", str(tmp_path / "half"), "--to-kind", "tpu:v5e")
    assert done.returncode == 2 and "checkpoint convert" in done.stderr, done

"""What a user names may be a link, or a folder of links, as the Hugging Face cache is. What a node reads may not."""

import os
import shutil

import pytest
import torch
from lazy_modules import LazyModule
from safetensors.torch import save_file

from workers import checkpoint
from workers.checkpoint import (
    DamagedCheckpoint,
    convert,
    copy,
    describe,
    diff,
    export_checkpoint,
    import_checkpoint,
    latest,
    list_checkpoints,
    load,
    open_checkpoint,
    plan,
    save,
    verify,
)
from workers.checkpoint.disk.inspect import newest
from workers.checkpoint.format.manifest import DAMAGED_REMEDY
from workers.checkpoint.tools import run, run_in_child
from workers.errors import CheckpointError

dcp_library = LazyModule("torch.distributed.checkpoint")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
WEIGHT = torch.arange(6.0).reshape(2, 3)
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 1234567\n".format("ab" * 32)


def linked(folder):
    """Moves every file of `folder` into a store of blobs and leaves links, as huggingface_hub does."""
    blobs = folder.parent / f"{folder.name}-blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(p for p in folder.iterdir() if p.is_file())):
        path.rename(blobs / f"{number:08x}")
        path.symlink_to(os.path.relpath(blobs / f"{number:08x}", folder))
    return folder


def single(folder):
    save_file({"weight": WEIGHT}, folder / "model.safetensors")


def shards(folder):
    for name, part in (("a", WEIGHT[:1]), ("b", WEIGHT[1:])):
        save_file({f"{name}.weight": part.contiguous()}, folder / f"model-{name}.safetensors")
    places = '{"a.weight": "model-a.safetensors", "b.weight": "model-b.safetensors"}'
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {places}}}')


def torch_file(folder):
    torch.save({"weight": WEIGHT}, folder / "pytorch_model.pt")


def dcp(folder):
    dcp_library.save({"model": {"weight": WEIGHT}}, checkpoint_id=str(folder))


def accelerate(folder):
    save(folder.parent / "own", 1, {"model": (net := torch.nn.Linear(3, 2)), "optimizer": torch.optim.SGD(
        net.parameters(), 0.1, momentum=0.9), "rng": True})  # fmt: skip
    shutil.rmtree(folder)
    export_checkpoint(next((folder.parent / "own").glob("step-*")), folder, format="accelerate")


@pytest.mark.parametrize("make", [single, shards, torch_file, dcp, accelerate], ids=lambda make: make.__name__)
def test_a_folder_of_links_is_imported_as_the_files_are_and_outlives_them(make, tmp_path, bits):
    folder = tmp_path / "snapshot"
    folder.mkdir()
    make(folder)
    source = folder / "pytorch_model.pt" if make is torch_file else folder
    expected = load(import_checkpoint(source, tmp_path / "files")["path"]).state
    linked(folder)
    told = import_checkpoint(source, tmp_path / "in")
    shutil.rmtree(tmp_path / "snapshot-blobs")
    assert bits(load(told["path"]).state["model"]) == bits(expected["model"])


def test_a_link_to_a_file_and_a_link_to_a_folder_may_be_named(tmp_path):
    for make, name in ((single, "model.safetensors"), (torch_file, "pytorch_model.pt")):
        folder = tmp_path / name
        folder.mkdir()
        make(folder)
        linked(folder)
        (tmp_path / f"to-{name}").symlink_to(folder)
        for source in (folder / name, tmp_path / f"to-{name}" / name):
            told = import_checkpoint(source, tmp_path / f"in-{name}")
            assert torch.equal(load(told["path"]).state["model"]["weight"], WEIGHT)


def test_a_node_still_refuses_links_in_what_was_left_behind(tmp_path):
    folder = tmp_path / "snapshot"
    folder.mkdir()
    single(folder)
    for source in (linked(folder), folder / "model.safetensors"):
        with pytest.raises(CheckpointError, match="it is a symbolic link") as refused:
            run_in_child("import", {"source": str(source), "root": str(tmp_path / "in")})
        assert refused.value.remedy == "replace the link with the file itself"
    own = linked(save(tmp_path / "root", 1, {"t": {"w": WEIGHT}}).path)
    assert not run_in_child("check", {"path": str(own)})["ok"]
    assert run_in_child("check", {"path": str(own)}, follow_links=True)["ok"]


def test_a_checkpoint_whose_files_are_links_is_loaded_by_who_names_it(tmp_path):
    folder = linked(save(tmp_path / "root", 3, {"t": {"w": WEIGHT}}).path)
    (tmp_path / "latest").symlink_to(folder)
    for verify_by in ("chunks", "once"):
        assert torch.equal(load(tmp_path / "latest", verify=verify_by).state["t"]["w"], WEIGHT)
    state = {"t": {"w": torch.zeros_like(WEIGHT)}}
    dcp_library.load(state, storage_reader=checkpoint.PolyfleetStorageReader(folder))
    assert torch.equal(state["t"]["w"], WEIGHT)


def opened(path, **options):
    with open_checkpoint(path, **options) as found:
        return found.tensor("t/w").tolist()


FUNCTIONS = {
    "verify": lambda path, out, **how: verify(path, **how)["ok"] or 1 / 0,
    "describe": lambda path, out, **how: describe(path, **how)["step"],
    "plan": lambda path, out, **how: plan(path, "cpu", **how)["ok"],
    "open": lambda path, out, **how: opened(path, **how),
    "diff": lambda path, out, **how: diff(path, path, **how)["same"],
    "export": lambda path, out, **how: export_checkpoint(path, out / "t.pt", format="torch", **how)["tensors"],
    "convert": lambda path, out, **how: convert(path, out, dtype={"*": "bfloat16"}, on_lossy="allow", **how)["step"],
    "copy": lambda path, out, **how: copy(path, out, **how)["files"],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_follows_the_links_of_a_checkpoint_that_its_caller_names(name, tmp_path):
    """Called by who reads for others, each refuses them."""
    use = FUNCTIONS[name]
    own = save(tmp_path / "root", 3, {"t": {"w": WEIGHT}}).path
    (tmp_path / own.name).symlink_to(linked(own))
    assert use(own, tmp_path / "out")
    assert use(tmp_path / own.name, tmp_path / "out-2")
    with pytest.raises((CheckpointError, ZeroDivisionError)):
        use(own, tmp_path / "out-3", follow_links=False)


def test_links_to_checkpoints_below_a_root_are_listed_for_its_user_and_not_for_nodes(tmp_path):
    root, other = tmp_path / "root", tmp_path / "other"
    first = save(root, 1, {"t": {"w": WEIGHT}}).path
    second = linked(save(other, 2, {"t": {"w": WEIGHT + 1}}).path)
    (root / second.name).symlink_to(second)
    (root / "round").symlink_to(root)
    places = [str(root / second.name), str(first)]
    assert [row["path"] for row in list_checkpoints(root)] == places
    assert latest(root).path == root / second.name
    assert newest(root)["path"] == str(root / second.name)
    for found in (load(root), load(root, step=2), load(root, verify="once")):
        assert torch.equal(found.state["t"]["w"], WEIGHT + 1)
    state = {"t": {"w": torch.zeros_like(WEIGHT)}}
    dcp_library.load(state, storage_reader=checkpoint.PolyfleetStorageReader(root))
    assert torch.equal(state["t"]["w"], WEIGHT + 1)
    assert copy(root, tmp_path / "copied")["step"] == 2
    assert [row["path"] for row in run_in_child("list", {"root": str(root)}, follow_links=True)] == places
    for tool in (run, run_in_child):
        assert [row["path"] for row in tool("list", {"root": str(root)})] == [str(first)]
        assert tool("newest", {"root": str(root)})["path"] == str(first)
    assert run_in_child("copy", {"source": str(root), "target": str(tmp_path / "of-a-node")})["step"] == 1
    assert run_in_child("verify", {"place": str(root)})["step"] == 1


def test_deleting_goes_through_no_link(tmp_path):
    root, other = tmp_path / "root", tmp_path / "other"
    kept = save(other, 1, {"t": {"w": WEIGHT}}).path
    for step in (2, 3):
        save(root, step, {"t": {"w": WEIGHT}})
    (root / kept.name).symlink_to(kept)
    run_in_child("prune", {"root": str(root), "keep": 1}, follow_links=True)
    assert verify(kept)["ok"]
    assert len(list_checkpoints(root)) == 2


def test_a_link_stays_no_part_of_a_checkpoint(tmp_path):
    folder = tmp_path / "snapshot"
    folder.mkdir()
    single(folder)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a link") as refused:
        import_checkpoint(linked(folder))
    assert refused.value.remedy == "name a folder to import into"
    assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors"]


def dangling(path):
    path.unlink()
    path.symlink_to("nowhere")


def pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("spoil", "says", "remedy"),
    [
        (lambda path: path.write_text(POINTER), "is a git-lfs pointer", "git lfs pull"),
        (dangling, "is a link to nowhere, which does not exist", "restore that file"),
        (pipe, "is not a regular file", "replace it with a regular file"),
    ],
    ids=["lfs", "dangling", "pipe"],
)
@pytest.mark.parametrize("make", [shards, dcp, accelerate], ids=lambda make: make.__name__)
def test_a_cause_that_is_no_damage_has_a_remedy_of_its_own(make, spoil, says, remedy, tmp_path):
    folder = tmp_path / "snapshot"
    folder.mkdir()
    make(folder)
    spoil(next(p for name in ("model-b.safetensors", "__0_0.distcp", "optimizer.bin") if (p := folder / name).exists()))
    with pytest.raises(CheckpointError) as refused:
        import_checkpoint(folder, tmp_path / "in")
    assert says in refused.value.message
    assert remedy in refused.value.remedy
    assert DAMAGED_REMEDY not in str(refused.value)


@pytest.mark.parametrize(("spoil", "says"), [(str, "is a git-lfs pointer"), (dangling, "is a link to nowhere")])
@pytest.mark.parametrize(("make", "name"), [(shards, "model.safetensors.index.json"), (dcp, ".metadata")])
def test_so_has_a_list_of_files(make, name, spoil, says, tmp_path):
    folder = tmp_path / "snapshot"
    folder.mkdir()
    make(folder)
    (folder / name).write_text(POINTER)
    spoil(folder / name)
    with pytest.raises(CheckpointError, match=says):
        import_checkpoint(folder, tmp_path / "in")


@pytest.mark.parametrize("which", ["shard", "manifest"])
def test_a_checkpoint_in_git_lfs_is_not_called_damaged(which, tmp_path):
    folder = save(tmp_path / "root", 1, {"t": {"w": WEIGHT}}).path
    path = next(folder.glob("*.safetensors")) if which == "shard" else folder / "MANIFEST.json"
    path.write_text(POINTER)
    with pytest.raises(DamagedCheckpoint, match="is a git-lfs pointer, not the file itself; run `git lfs pull`"):
        load(folder)

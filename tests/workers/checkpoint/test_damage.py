"""Flipped bits, cut files and manifests that lie: named, refused, and nothing of them loaded."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from cluster.errors import NotFound
from workers.checkpoint import DamagedCheckpoint, latest, load, open_checkpoint, save, verify
from workers.checkpoint.format.manifest import MAX_MANIFEST_BYTES, NAME, manifest_digest
from workers.errors import CheckpointError

SHARD = "shard-00001.safetensors"


@pytest.fixture
def root(tied, train, tmp_path) -> Path:
    """Steps 1 and 2 of a training; 2 is the one the tests damage."""
    model = tied()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (1, 2):
        train(model, optimizer, 1)
        save(tmp_path, step, {"model": model, "optimizer": optimizer, "rng": True, "extra": {"step": step}})
    return tmp_path


def second(root: Path) -> Path:
    return next(root.glob("step-00000002-*"))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def lie(folder: Path, change) -> None:
    """Rewrite the manifest after `change`, with a digest that holds."""
    data = json.loads((folder / NAME).read_text())
    change(data)
    data["digest"] = manifest_digest(data)
    (folder / NAME).write_text(json.dumps(data))


def refused_everywhere(folder: Path, said: str, tied, image) -> None:
    """By verify, by a load from its path, by reading a tensor; and `latest` falls back and says so."""
    report = verify(folder)
    assert not report["ok"]
    assert any(said in problem for problem in report["problems"]), report["problems"]
    live = tied()
    optimizer = torch.optim.AdamW(live.parameters())
    before = image(live, optimizer)
    with pytest.raises(DamagedCheckpoint):
        load(folder, {"model": live, "optimizer": optimizer, "rng": True})
    assert image(live, optimizer) == before
    loaded = load(folder.parent, {"model": live})
    assert loaded.step == loaded.state["extra"]["step"] == 1
    assert [skipped.path for skipped in loaded.report.skipped] == [str(folder)]
    assert said in loaded.report.skipped[0].reason


@pytest.mark.parametrize("place", ["header length", "header", "padding", "first value", "last byte"])
def test_a_flipped_bit_in_a_shard_is_named(place, root, tied, image):
    path = second(root) / SHARD
    at = {"header length": 0, "header": 20, "padding": 4095, "first value": 4096, "last byte": path.stat().st_size - 1}
    before = path.stat().st_size
    flip(path, at[place])
    assert path.stat().st_size == before
    refused_everywhere(second(root), f"{SHARD}: chunk 1 of 1 is not what was saved", tied, image)


def test_every_bit_of_the_manifest_counts(root):
    manifest = second(root) / NAME
    whole = manifest.read_bytes()
    for at in range(0, len(whole), 97):
        flip(manifest, at)
        read = json_or_none(manifest)
        if read != json.loads(whole):  # a flipped space is still a space to JSON
            assert not verify(second(root))["ok"], at
        manifest.write_bytes(whole)


def json_or_none(path: Path) -> object:
    try:
        return json.loads(path.read_text())
    except ValueError:
        return None


@pytest.mark.parametrize("cut", [0, 1, 4096, -1])
def test_a_cut_shard_is_named_with_what_is_missing(cut, root, tied, image):
    path = second(root) / SHARD
    kept = cut if cut >= 0 else path.stat().st_size + cut
    said = f"{SHARD} has {kept} bytes, {path.stat().st_size} were saved"
    os.truncate(path, kept)
    refused_everywhere(second(root), said, tied, image)


def test_the_tensors_of_a_damaged_chunk_are_named_and_the_others_still_read(tmp_path):
    state = {"t": {"a": torch.zeros(1_000_000), "b": torch.ones(2_000_000), "c": torch.ones(3)}}
    saved = save(tmp_path, 1, state)
    flip(saved.path / SHARD, (8 << 20) + 5)
    [problem] = verify(saved.path)["problems"]
    assert "chunk 2 of 2 is not what was saved (bytes 8388608 to 12004108: t/b, t/c)" in problem
    with open_checkpoint(saved.path) as opened:
        assert torch.equal(opened.tensor("t/a"), state["t"]["a"])
        with pytest.raises(DamagedCheckpoint, match="chunk 2 of 2"):
            opened.tensor("t/c")
        with pytest.raises(NotFound, match=r"no tensor 't/aa'; did you mean 't/a'\?"):
            opened.tensor("t/aa")


def test_an_empty_cut_or_missing_manifest(root, tied, image):
    manifest = second(root) / NAME
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[: len(whole) // 2])
    refused_everywhere(second(root), "is not the JSON that was saved", tied, image)
    manifest.write_bytes(b"")
    refused_everywhere(second(root), "is not the JSON that was saved", tied, image)
    manifest.unlink()
    found = latest(root)
    assert found is not None
    assert (found.step, found.skipped) == (1, ())
    with pytest.raises(NotFound, match=r"is not a checkpoint: it has no MANIFEST\.json"):
        verify(second(root))


def test_pipes_and_absent_files_are_refused(root, tied, image):
    path = second(root) / SHARD
    elsewhere = shutil.move(path, root / "elsewhere")
    refused_everywhere(second(root), f"{SHARD} cannot be opened: No such file", tied, image)
    os.mkfifo(path)
    refused_everywhere(second(root), f"{SHARD} is not a regular file", tied, image)
    path.unlink()
    path.symlink_to("nowhere")
    refused_everywhere(second(root), f"{SHARD} cannot be opened: it is a link to nowhere", tied, image)
    path.unlink()
    shutil.move(elsewhere, path)
    assert verify(second(root))["ok"]


def tensor(data, name="model/middle.weight"):
    return data["tensors"][name]


def place(data, name="model/middle.weight"):
    return tensor(data, name)["shards"][0]


LIES = {
    "a path that climbs": (
        lambda d: d["files"].update({"../x.safetensors": d["files"].pop(SHARD)}),
        "file '../x.safetensors' is not the name of a shard in this folder",
    ),
    "an absolute path": (lambda d: d["files"].update({"/etc/passwd": d["files"][SHARD]}), "file '/etc/passwd' is not"),
    "a hidden file": (lambda d: d["files"].update({".a.safetensors": d["files"][SHARD]}), "file '.a.safetensors' is"),
    "a negative size": (lambda d: d["files"][SHARD].update(bytes=-1), f"file '{SHARD}' declares -1 bytes"),
    "an absurd size": (lambda d: d["files"][SHARD].update(bytes=2**62), f"file '{SHARD}' has 1 chunk hashes for"),
    "too many hashes": (lambda d: d["files"][SHARD]["xxh3_128"].append("0"), f"file '{SHARD}' has 2 chunk hashes"),
    "a size in words": (lambda d: d["files"][SHARD].update(bytes="many"), "Manifest.files"),
    "an unlisted file": (
        lambda d: place(d).update(file="other.safetensors"),
        "is in file 'other.safetensors', which is",
    ),
    "an absurd shape": (lambda d: tensor(d).update(shape=[2**40, 2**40]), "model/middle.weight' declares"),
    "an endless shape": (lambda d: tensor(d).update(shape=[1] * 1000), "model/middle.weight' has the impossible shape"),
    "a negative shape": (lambda d: tensor(d).update(shape=[-8, -8]), "has the impossible shape [-8, -8]"),
    "a larger dtype": (lambda d: tensor(d).update(dtype="complex128"), "overlap in file"),
    "a shared offset": (
        lambda d: place(d).update(offset=place(d, "model/middle.bias")["offset"]),
        "tensors 'model/middle.bias' and 'model/middle.weight' overlap",
    ),
    "a negative offset": (lambda d: place(d).update(offset=-4), "bytes at offset -4"),
    "an offset beyond": (lambda d: place(d).update(offset=2**40), "bytes at offset 1099511627776"),
    "a strange dtype": (lambda d: tensor(d).update(dtype="object"), "has the unknown dtype 'object'"),
    "a strange role": (lambda d: tensor(d).update(role="thief"), "has the unknown role 'thief'"),
    "a strange layout": (lambda d: tensor(d).update(layout=[0, 0]), "has layout [0, 0] for 2 dimensions"),
    "a strange kind": (lambda d: d["entries"]["model"].update(kind="pickle"), "entry 'model' is of the unknown kind"),
    "a tie to nothing": (lambda d: tensor(d, "model/head.weight").update(alias_of="x"), "is tied to 'x', which is not"),
    "a tie to a tie": (
        lambda d: tensor(d, "model/head.weight").update(alias_of="model/head.weight"),
        "'model/head.weight' is tied to 'model/head.weight', which is not stored",
    ),
    "a negative step": (lambda d: d.update(step=-2), "step -2 is negative"),
    "another format": (lambda d: d.update(format="zip"), "is not a polyfleet-checkpoint manifest"),
}


@pytest.mark.parametrize(("change", "said"), LIES.values(), ids=LIES)
def test_a_manifest_that_lies_is_refused(change, said, root, tied, image):
    lie(second(root), change)
    refused_everywhere(second(root), said, tied, image)


def test_a_manifest_of_a_newer_version_is_not_guessed_at(root):
    lie(second(root), lambda d: d.update(version=4))
    with pytest.raises(
        CheckpointError, match="has format version 4, this Polyfleet reads versions 1 to 3; read it with a newer"
    ):
        load(second(root))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1, "a": 2}', "a key occurs twice"),
        ('{"a": NaN}', "NaN is not JSON"),
        ("[" * 100_000, "is not the JSON that was saved"),
        ('{"format": "polyfleet-checkpoint", "digest": "0"}', "does not match its own digest"),
        ("[]", "is not a polyfleet-checkpoint manifest"),
        ("\xff", "is not the JSON that was saved"),
    ],
)
def test_a_manifest_that_is_no_manifest_is_refused(text, said, root, tied, image):
    (second(root) / NAME).write_text(text, encoding="latin-1")
    refused_everywhere(second(root), said, tied, image)


def test_a_manifest_of_absurd_size_is_not_read(root, tied, image):
    os.truncate(second(root) / NAME, MAX_MANIFEST_BYTES + 1)
    refused_everywhere(second(root), f"a manifest has at most {MAX_MANIFEST_BYTES}", tied, image)


def test_malformed_trees_are_damage_and_leave_the_live_objects_alone(root, tied, image):
    lies = [
        lambda d: d["entries"]["optimizer"].update(tree={"groups": 3}),
        lambda d: d["entries"]["optimizer"]["tree"]["state"]["model/middle.bias"].update(step={"$tensor": "nowhere"}),
        lambda d: d["entries"]["rng"].update(tree={"seed": 1}),
        lambda d: d["entries"]["extra"].update(tree={"$unknown": 1}),
    ]
    whole = (second(root) / NAME).read_bytes()
    for change in lies:
        lie(second(root), change)
        live = tied()
        optimizer = torch.optim.AdamW(live.parameters())
        before = image(live, optimizer)
        with pytest.raises(DamagedCheckpoint):
            load(second(root), {"model": live, "optimizer": optimizer, "rng": True})
        assert image(live, optimizer) == before
        (second(root) / NAME).write_bytes(whole)


def test_when_nothing_is_sound_that_is_an_error_and_no_new_beginning(root, tmp_path):
    for folder in root.iterdir():
        flip(folder / SHARD, -1)
    with pytest.raises(DamagedCheckpoint, match=r"none of the 2 checkpoints in .* is sound; the newest: "):
        latest(root)
    assert latest(tmp_path / "empty") is None
    with pytest.raises(NotFound, match="no checkpoint in"):
        load(tmp_path / "empty")
    with pytest.raises(NotFound, match=r"no checkpoint of step 5 in .*; saved steps: 1, 2"):
        load(root, step=5)

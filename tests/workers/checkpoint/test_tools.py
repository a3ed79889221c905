"""diff, convert, prune and pin, on checkpoints a person would have."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from cluster.errors import Conflict, NotFound, UserError
from workers.checkpoint import convert, diff, list_checkpoints, load, pin, prune, save, unpin, verify
from workers.checkpoint.disk.commit import writer_lock
from workers.checkpoint.disk.pins import HOLD, hold
from workers.checkpoint.format.manifest_checks import read_manifest
from workers.errors import CheckpointError


def flip_last(folder):
    path = next(folder.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_equal_checkpoints_differ_in_nothing(tied, tmp_path):
    model = tied()
    a, b = (save(tmp_path / side, 1, {"model": model, "extra": {"x": 1}}).path for side in "ab")
    told = diff(a, b)
    assert (told["same"], told["tensors"], told["equal"]) == (True, [], 9)


def test_a_difference_is_told_in_values_and_in_representable_numbers(tmp_path):
    one = {"w": torch.tensor([1.0, 2.0, 4.0, 0.0]), "n": torch.tensor([1, 2]), "gone": torch.zeros(1)}
    other = {"w": one["w"].clone(), "n": torch.tensor([1, 5]), "new": torch.zeros(1)}
    other["w"][1] = torch.nextafter(torch.tensor(2.0), torch.tensor(3.0))
    other["w"][3] = -0.0
    a = save(tmp_path / "a", 1, {"t": one, "extra": [1]}).path
    b = save(tmp_path / "b", 2, {"t": other, "extra": [2]}).path
    told = diff(a, b)
    rows = {row["name"]: row for row in told["tensors"]}
    assert rows["t/w"]["changed"] == 2  # minus zero is other bits
    assert rows["t/w"]["max_ulp"] == 1
    assert rows["t/w"]["max_abs"] == pytest.approx(2**-22)
    assert rows["t/n"] == {
        "name": "t/n", "dtype": "int64", "shape": [2], "changed": 1, "max_abs": 3.0, "max_rel": 1.5, "max_ulp": 0,
    }  # fmt: skip
    assert (told["only_in_a"], told["only_in_b"], told["entries"]) == (["t/gone"], ["t/new"], ["extra", "t"])


def test_other_dtypes_are_compared_by_value_and_other_shapes_only_named(tmp_path):
    a = save(tmp_path / "a", 1, {"t": {"w": torch.tensor([1.001, 2.0]), "s": torch.zeros(3)}}).path
    b = save(tmp_path / "b", 1, {"t": {"w": torch.tensor([1.001, 2.0]).bfloat16(), "s": torch.zeros(4)}}).path
    rows = {row["name"]: row for row in diff(a, b)["tensors"]}
    assert (rows["t/w"]["dtype_b"], rows["t/w"]["changed"]) == ("bfloat16", 1)
    assert (rows["t/s"]["shape"], rows["t/s"]["shape_b"]) == ([3], [4])
    assert "changed" not in rows["t/s"]


def test_conversion_for_a_kind_that_nobody_lists_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(UserError, match="unknown kind 'nvidia:A10O'; did you mean 'nvidia:A10"):
        convert(tmp_path / "nowhere", tmp_path / "b", to_kind="nvidia:A10O")


def test_conversion_for_a_kind_writes_what_it_computes_with_and_reports_it(tied, tmp_path):
    model = tied().half()
    wide = torch.tensor([0.5, 0.25], dtype=torch.float64)
    source = save(tmp_path / "a", 4, {"model": model, "extra": {"wide": wide, "n": 3}, "rng": True}).path
    with pytest.raises(CheckpointError, match=r"model/embedding.weight float16 -> bfloat16: \d+ values change"):
        convert(source, tmp_path / "b", to_kind="tpu:v5e")
    assert not (tmp_path / "b").exists()
    told = convert(source, tmp_path / "b", to_kind="tpu:v5e", on_lossy="allow")
    assert (told["dtypes"], told["step"]) == (["bfloat16", "float32", "int64", "uint32", "uint8"], 4)
    assert told["converted"]["extra/wide"]["change"]["values_changed"] == 0
    loaded = load(told["path"])
    assert torch.equal(loaded.state["model"]["head.weight"], model.head.weight.bfloat16())
    assert loaded.state["model"]["head.weight"] is loaded.state["model"]["embedding.weight"]
    assert loaded.state["extra"]["n"] == 3
    assert verify(told["path"])["ok"]
    again = convert(source, tmp_path / "b", to_kind="tpu:v5e", on_lossy="allow")
    assert (told["already_there"], again) == (False, told | {"already_there": True})


def test_what_was_converted_can_be_converted_again_into_the_same_folder(tmp_path):
    source = save(tmp_path / "a", 1, {"t": torch.ones(3, dtype=torch.float64)}).path
    once = convert(source, tmp_path / "b", dtype={"float64": "float32"})
    twice = convert(once["path"], tmp_path / "b", dtype={"float32": "bfloat16"})
    other = convert(source, tmp_path / "b", dtype={"float64": "float16"})
    found = {path: str(load(path).state["t"].dtype) for path in (once["path"], twice["path"], other["path"])}
    assert list(found.values()) == ["torch.float32", "torch.bfloat16", "torch.float16"]
    Path(once["path"], "MANIFEST.json").unlink()  # as a conversion that was cut leaves it
    assert convert(source, tmp_path / "b", dtype={"float64": "float32"})["path"] == once["path"]
    assert len(list_checkpoints(tmp_path / "b")) == 3


def test_conversion_by_a_mapping_widens_large_tensors_exactly(tmp_path):
    state = {"big": torch.randn(3_000_001).bfloat16(), "kept": torch.randn(4).half()}
    source = save(tmp_path / "a", 1, {"t": state}).path
    told = convert(source, tmp_path / "b", dtype={"t/big": "float32"})
    loaded = load(told["path"]).state["t"]
    assert torch.equal(loaded["big"], state["big"].float())
    assert torch.equal(loaded["kept"], state["kept"])


def test_fp8_of_one_flavour_becomes_the_other_with_its_scale(tmp_path):
    weight, scale = torch.randn(64).to(torch.float8_e4m3fn), torch.tensor([0.5])
    source = save(tmp_path / "a", 1, {"t": {"w": weight, "w_scale": scale}}).path
    assert read_manifest(source).tensors["t/w"].scale == "t/w_scale"
    told = convert(source, tmp_path / "b", to_kind="amd:MI300X")
    there = load(told["path"]).state["t"]
    assert there["w"].dtype == torch.float8_e4m3fnuz
    assert torch.equal(there["w"].float() * there["w_scale"], weight.float() * scale)
    assert told["notes"] == ["t/w_scale times 2: the bits of t/w are now float8_e4m3fnuz"]
    back = load(convert(told["path"], tmp_path / "c", to_kind="nvidia:H100-80GB")["path"]).state["t"]
    assert torch.equal(back["w"].float() * back["w_scale"], weight.float() * scale)
    unscaled = save(tmp_path / "d", 1, {"t": weight}).path
    with pytest.raises(CheckpointError, match="no scale that could compensate for it"):
        convert(unscaled, tmp_path / "e", dtype={"float8_e4m3fn": "float8_e4m3fnuz"})


def names(root):
    return [row["step"] for row in list_checkpoints(root)]


def test_pruning_keeps_the_newest_sound_ones_and_those_pinned(tmp_path):
    saved = [save(tmp_path, step, {"extra": {"step": step}, "t": torch.ones(9)}) for step in range(1, 7)]
    pin(saved[0].path)
    flip_last(saved[5].path)
    planned = prune(tmp_path, 2, dry_run=True)
    assert names(tmp_path) == [6, 5, 4, 3, 2, 1]
    told = prune(tmp_path, 2)
    assert told["deleted"] == planned["deleted"] == [saved[2].path.name, saved[1].path.name]
    assert names(tmp_path) == [6, 5, 4, 1]  # 6 is damaged: somebody should look at it
    unpin(saved[0].path)
    save(tmp_path, 7, {"t": torch.ones(1)}, keep=2)
    assert names(tmp_path) == [7, 6]


def test_one_that_is_being_copied_stays_until_some_minutes_after(tmp_path):
    first, *_ = [save(tmp_path, step, {"t": torch.ones(9)}) for step in range(1, 4)]
    hold(first.path)
    assert len(prune(tmp_path, 1)["deleted"]) == 1
    save(tmp_path, 4, {"t": torch.ones(1)}, keep=1)
    assert names(tmp_path) == [4, 1]
    os.utime(first.path / HOLD, (1.0, 1.0))
    prune(tmp_path, 1)
    assert names(tmp_path) == [4]


def test_pruning_never_deletes_for_the_sake_of_a_damaged_one(tmp_path):
    for step in (1, 2):
        flip_last(save(tmp_path, step, {"t": torch.ones(9)}).path)
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        prune(tmp_path, 1)
    for wrong, keep, kind in ((tmp_path / "empty", 1, NotFound), (tmp_path, 0, UserError)):
        with pytest.raises(kind):
            prune(wrong, keep)


def test_a_save_deletes_nothing_older_when_what_it_wrote_reads_back_wrong(tmp_path):
    from workers.checkpoint.disk.files import Files

    class Rotting(Files):
        """The disk that loses a bit of what it was given."""

        def rename(self, old, new):
            if new.name == "MANIFEST.json":
                flip_last(new.parent)
            super().rename(old, new)

    save(tmp_path, 1, {"t": torch.ones(9)})
    notes = save(tmp_path, 2, {"t": torch.ones(9)}, keep=1, files=Rotting()).notes
    assert "nothing older was deleted" in notes[0]
    assert "chunk 1 of 1 is not what was saved" in notes[0]
    assert load(tmp_path).step == 1


def test_two_writers_on_one_folder_do_not_meet(tmp_path):
    with writer_lock(tmp_path), pytest.raises(Conflict, match="another process is saving into"):
        save(tmp_path, 1, {"t": torch.ones(1)})
    assert list(tmp_path.iterdir()) == []
    save(tmp_path, 1, {"t": torch.ones(1)})


def test_a_background_save_holds_what_was_there_when_it_was_called(tmp_path):
    model = nn.Linear(400, 400)
    before = model.weight.detach().clone()
    saving = save(tmp_path, 1, {"model": model}, asynchronous=True)
    with torch.no_grad():
        model.weight.zero_()
    saved = saving.result()
    assert saved.path == saving.path
    assert saved.blocked_s <= saving.blocked_s
    assert torch.equal(load(tmp_path).state["model"]["weight"], before)


def test_background_saves_follow_one_another_and_an_error_is_told_by_the_next(tmp_path):
    savings = [
        save(tmp_path / "a", step, {"t": torch.full((9,), step)}, asynchronous=True, keep=2) for step in range(4)
    ]
    assert [s.result().step for s in savings] == [0, 1, 2, 3]
    assert names(tmp_path / "a") == [3, 2]
    (tmp_path / "file").touch()
    failing = save(tmp_path / "file", 1, {"t": 1}, asynchronous=True)
    with pytest.raises(CheckpointError, match="cannot save step 1 in"):
        save(tmp_path / "a", 5, {"t": 1}, asynchronous=True)
    assert failing.done()
    assert save(tmp_path / "a", 6, {"t": 1}, asynchronous=True).result().step == 6

"""Twenty-five ways in which moving a checkpoint goes wrong with what people use, by the numbers of the list they were
found on. Each is tried with ours: it does not happen, or an error names the tensor and the remedy."""

import argparse
import json
import os
import pathlib
import subprocess
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from workers.checkpoint import (
    DamagedCheckpoint,
    describe,
    export_checkpoint,
    import_checkpoint,
    load,
    save,
    verify,
)
from workers.checkpoint.disk.files import Files
from workers.errors import CheckpointError

INTERPRETER = os.environ.get("POLYFLEET_XLA_PYTHON", "")
XLA = Path(__file__).with_name("xla_traps.py")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens):
        return self.head(self.emb(tokens))


def step(model, optimizer, number):
    torch.manual_seed(number)
    tokens = torch.randint(0, 8, (6,))
    loss = nn.functional.cross_entropy(model(tokens), tokens)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def trained(steps=3):
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, optimizer, [step(model, optimizer, number) for number in range(steps)]


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """What xla_traps.py found, and the folder it worked in."""
    if not INTERPRETER:
        pytest.skip("POLYFLEET_XLA_PYTHON names no interpreter that has torch_xla")
    root = tmp_path_factory.mktemp("traps")
    model, optimizer, _ = trained()
    save(root / "cpu", 3, {"model": model, "optimizer": optimizer, "rng": True, "extra": {"t": torch.ones(2)}})
    save(root / "complex", 1, {"t": torch.tensor([1 + 2j, 3.1 - 1e-3j], dtype=torch.complex128)})
    save(root / "fnuz", 1, {"t": torch.ones(3).to(torch.float8_e4m3fnuz)})
    save(root / "image", 1, {"model": nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)})
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "PJRT_DEVICE": "CPU"}
    done = subprocess.run([INTERPRETER, XLA, root], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return root, json.loads(done.stdout.splitlines()[-1])


def test_1_ties_survive_a_move_that_unties_them(there):
    root, found = there
    assert found["1 untied by the move"]
    assert found["1 tied by the load"]
    back = load(root / "xla").state["model"]
    assert back["head.weight"] is back["emb.weight"]
    assert describe(next((root / "xla").glob("step-*")))["ties"] == {"model/head.weight": "model/emb.weight"}


def test_2_an_optimizer_built_before_the_move_is_an_error(there):
    assert "so its steps train nothing" in there[1]["2 stale optimizer"]


def test_3_and_18_what_the_device_cannot_hold_is_refused_by_name_or_converted(there):
    assert "t is complex128: XLA silently drops its imaginary part" in there[1]["3 complex128"]
    assert "t is float8_e4m3fnuz: torch_xla does not support the type" in there[1]["18 fnuz"]
    assert there[1]["18 converted"] == ["bfloat16"]


def test_8_memory_layout_survives_the_device(there):
    assert load(there[0] / "image").state["model"]["weight"].is_contiguous(memory_format=torch.channels_last)
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    load(there[0] / "image back", {"model": model})
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(model.weight, load(there[0] / "image").state["model"]["weight"])


def test_9_a_stream_that_cannot_follow_is_derived_and_said(there):
    assert there[1]["9 random"] == "derived from (seed, rank, step, device type): saved on cpu"


def test_14_and_15_tensors_of_the_device_load_anywhere_and_there(there):
    assert there[1]["15 load to the device"] == "xla"
    assert load(there[0] / "xla").state["model"]["emb.weight"].device.type == "cpu"


def test_16_a_file_of_torch_from_the_device_can_be_imported(there):
    told = import_checkpoint(there[0] / "from xla.pt", there[0] / "imported")
    assert torch.equal(load(told["path"]).state["model"]["w"], load(there[0] / "xla").state["model"]["emb.weight"])


def test_19_the_optimizer_goes_on_there_as_it_would_have_here(there):
    model, optimizer, _ = trained()
    here = [step(model, optimizer, number) for number in range(3, 6)]
    assert there[1]["19 losses"] == pytest.approx(here, rel=1e-5)
    assert there[1]["19 options"] == [0.05, "cpu"]


def test_4_a_cast_that_changes_values_is_an_error_and_leaves_the_model(tmp_path):
    save(tmp_path, 1, {"model": nn.Linear(3, 3)})
    live = nn.Linear(3, 3).bfloat16()
    before = live.weight.clone()
    with pytest.raises(CheckpointError, match=r"model/weight float32 -> bfloat16: \d values change"):
        load(tmp_path, {"model": live})
    assert torch.equal(live.weight, before)


def test_5_slots_keep_their_dtype(tmp_path):
    model = nn.Linear(3, 3).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["exp_avg"] = torch.rand(3, 3)  # kept in float32 beside a bfloat16 parameter
    save(tmp_path, 1, {"model": model, "optimizer": optimizer})
    other = nn.Linear(3, 3).bfloat16()
    fresh = torch.optim.AdamW(other.parameters())
    load(tmp_path, {"model": other, "optimizer": fresh})
    assert torch.equal(fresh.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_6_how_a_step_is_computed_is_the_live_optimizers_business(tmp_path):
    model, optimizer, _ = trained(1)
    save(tmp_path, 1, {"model": model, "optimizer": optimizer})
    other = Tied()
    live = torch.optim.AdamW(other.parameters(), lr=1.0, foreach=True)
    load(tmp_path, {"model": other, "optimizer": live})
    assert (live.param_groups[0]["foreach"], live.param_groups[0]["lr"]) == (True, 0.05)


def test_7_and_23_a_tie_is_stored_once_and_found_again(tmp_path):
    model, _, _ = trained(1)
    saved = save(tmp_path, 1, {"model": model})
    assert saved.bytes < 2 * model.emb.weight.nbytes + 4096
    other = Tied()
    load(tmp_path, {"model": other})
    assert other.head.weight is other.emb.weight
    export_checkpoint(saved.path, tmp_path / "hf")
    told = import_checkpoint(tmp_path / "hf", tmp_path / "back")
    report = load(told["path"], {"model": other}).report
    assert report.notes == ["model/head.weight is tied in the live model, and stored only under another name"]


def test_10_one_flipped_bit_is_found_and_named(tmp_path):
    model, _, _ = trained(1)
    path = save(tmp_path, 1, {"model": model}).path
    shard = next(path.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=r"chunk 1 of 1 is not what was saved .*model/emb\.weight"):
        load(path)


class CutOff(Files):
    """A disk that is full from the manifest on."""

    def rename(self, old, new):
        if new.name == "MANIFEST.json":
            raise OSError(28, "No space left on device")
        super().rename(old, new)


def test_11_and_12_a_save_cut_at_the_end_is_not_seen_and_nothing_is_mixed(tmp_path):
    model, optimizer, _ = trained(1)
    save(tmp_path, 1, {"model": model, "optimizer": optimizer})
    old = model.emb.weight.detach().clone()
    step(model, optimizer, 1)
    with pytest.raises(CheckpointError, match="No space left"):
        save(tmp_path, 2, {"model": model, "optimizer": optimizer}, files=CutOff())
    loaded = load(tmp_path)
    assert loaded.step == 1
    assert torch.equal(loaded.state["model"]["emb.weight"], old)


def test_12_half_of_what_accelerate_saved_is_refused(tmp_path):
    model, optimizer, _ = trained(1)
    path = save(tmp_path / "own", 1, {"model": model, "optimizer": optimizer, "rng": True}).path
    export_checkpoint(path, tmp_path / "folder", format="accelerate")
    names = {path.name for path in (tmp_path / "folder").iterdir()}
    assert names == {"model.safetensors", "optimizer.bin", "random_states_0.pkl"}
    (tmp_path / "folder" / "optimizer.bin").unlink()
    with pytest.raises(CheckpointError, match=r"is incomplete: optimizer\.bin is missing"):
        import_checkpoint(tmp_path / "folder", tmp_path / "imported")


class Wrapped(nn.Module):
    """A model may own a real `module.` key."""

    def __init__(self):
        super().__init__()
        self.module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


@pytest.mark.parametrize(
    "prefix", ["_orig_mod.", "_orig_mod.module.", "module._orig_mod.", "model.", "inner"], ids=lambda p: p
)
def test_13_and_22_prefixes_of_others_are_taken_off_only_if_that_makes_the_names_match(prefix, tmp_path):
    model, live = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    names = {n: n.replace(".", "._orig_mod.") if prefix == "inner" else prefix + n for n in model.state_dict()}
    named = {names[n]: tensor for n, tensor in model.state_dict().items()}
    torch.save(named, tmp_path / "file.pt")
    told = import_checkpoint(tmp_path / "file.pt", tmp_path / "imported")
    report = load(told["path"], {"model": live}).report
    assert torch.equal(live[0].weight, model[0].weight)
    assert "from the stored names" in report.notes[0]
    with pytest.raises(CheckpointError, match="tensor names differ: 4 only in the live model"):
        load(told["path"], {"model": Other()})


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 3), nn.Linear(3, 2)


def test_22_a_real_module_key_keeps_its_name(tmp_path):
    save(tmp_path, 1, {"model": nn.DataParallel(Wrapped())})
    assert "module.0.weight" in load(tmp_path).state["model"]


def test_17_and_21_what_others_pickle_is_read_without_running_it(tmp_path):
    held = {
        "rng": np.random.get_state(), "f": np.float64(1.5), "ns": argparse.Namespace(lr=0.1), "p": pathlib.Path("/a/b"),
        "dd": defaultdict(list, {"a": [1]}), "od": OrderedDict(b=2), "w": torch.arange(3.0),
    }  # fmt: skip
    torch.save(held, tmp_path / "file.pt")
    state = load(import_checkpoint(tmp_path / "file.pt", tmp_path / "imported")["path"]).state
    flat = state | state["extra"]
    assert (flat["ns"], flat["dd"], dict(flat["od"]), flat["p"]) == ({"lr": 0.1}, {"a": [1]}, {"b": 2}, "/a/b")
    assert (flat["f"], type(flat["f"])) == (1.5, np.float64)
    assert np.array_equal(flat["rng"][1], held["rng"][1])
    assert torch.equal(flat["w"], held["w"])


def test_20_a_file_of_another_vendors_device_is_imported_wherever_we_are(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "file.pt")
    data = (tmp_path / "file.pt").read_bytes()
    patched = data.replace(b"X\x03\x00\x00\x00cpu", b"X\x03\x00\x00\x00npu")
    assert patched != data
    (tmp_path / "file.pt").write_bytes(patched)
    with pytest.raises(CheckpointError, match=r"Bad CRC-32 for file .*data\.pkl"):
        import_checkpoint(tmp_path / "file.pt", tmp_path / "imported")
    with zipfile.ZipFile(tmp_path / "file.pt") as old, zipfile.ZipFile(tmp_path / "npu.pt", "w") as new:
        for info in old.infolist():
            info.CRC = 0
            new.writestr(info.filename, _raw(tmp_path / "file.pt", old, info))
    told = import_checkpoint(tmp_path / "npu.pt", tmp_path / "imported")
    assert load(told["path"]).state["model"]["w"].tolist() == [1, 1]
    manifest = json.loads((Path(told["path"]) / "MANIFEST.json").read_text())
    assert manifest["tensors"]["model/w"]["device"] == "npu"


def _raw(path, archive, info):
    with path.open("rb") as file:
        file.seek(info.header_offset + 26)
        name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
        file.seek(info.header_offset + 30 + name + extra)
        return file.read(info.compress_size)


def test_24_dtypes_and_shapes_that_safetensors_refuses_are_stored_for_others_to_read(tmp_path):
    old = os.umask(0o027)
    try:
        state = {
            "c": torch.ones(2, dtype=torch.complex128),
            "t": torch.ones(2, 3).t(),
            "n": {"deep": [1, torch.ones(1)]},
        }
        saved = save(tmp_path, 1, state)
    finally:
        os.umask(old)
    assert {path.stat().st_mode & 0o777 for path in saved.path.iterdir()} == {0o640}
    assert verify(saved.path)["ok"]


def test_25_a_failed_save_leaves_the_old_one_and_its_error_is_an_ordinary_one(tmp_path):
    save(tmp_path, 1, {"t": torch.ones(3)})
    with pytest.raises(Exception, match="No space left"):
        save(tmp_path, 1, {"t": torch.zeros(3)}, files=CutOff())
    assert load(tmp_path).state["t"].tolist() == [1, 1, 1]

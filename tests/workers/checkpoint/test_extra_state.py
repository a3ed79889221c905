"""What modules give in `get_extra_state` goes with their tensors: saved, imported, exported, through every format."""

import io
import json
from pathlib import Path

import pytest
import torch
from lazy_modules import LazyModule
from safetensors.torch import load_file, save_file
from torch import nn

from workers.checkpoint import load, save
from workers.checkpoint.exchange.exporter import export_checkpoint
from workers.checkpoint.exchange.importer import import_here
from workers.checkpoint.format.manifest import DamagedCheckpoint, manifest_digest
from workers.errors import CheckpointError

dcp = LazyModule("torch.distributed.checkpoint")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Scaled(nn.Linear):
    """As layers for fp8 keep their scales: beside the parameters, in values and tensors of its own."""

    def __init__(self):
        super().__init__(2, 2)
        self.extra = {"amax": torch.zeros(2), "steps": 0}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


class Packed(Scaled):
    """All of it in one tensor, as Transformer Engine has it, so that safetensors can hold it."""

    def __init__(self):
        super().__init__()
        self.extra = torch.zeros(3, dtype=torch.uint8)


def build(kind=Scaled):
    return nn.Sequential(kind(), kind())


@pytest.fixture
def scaled():
    model = build()
    model[0].extra = {"amax": torch.tensor([1.5, 2.5]), "steps": 3}
    return model


@pytest.fixture
def packed():
    model = build(Packed)
    model[1].extra = torch.tensor([7, 8, 9], dtype=torch.uint8)
    return model


def check_scaled(live):
    assert live[0].extra["amax"].tolist() == [1.5, 2.5]
    assert (live[0].extra["steps"], live[1].extra["steps"]) == (3, 0)


def imported(source, tmp_path):
    return import_here(str(source), str(tmp_path / "root"))["path"]


def test_tensors_in_it_come_back_to_the_module_and_to_a_state_dict(scaled, tmp_path):
    save(tmp_path, 1, {"model": scaled})
    live, other = build(), build()
    load(tmp_path, {"model": live})
    check_scaled(live)
    other.load_state_dict(load(tmp_path).state["model"])
    check_scaled(other)


@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod."])
def test_a_file_of_torch_save_brings_it(scaled, wrapper, tmp_path):
    held = {f"{wrapper}{key}": value for key, value in scaled.state_dict().items()}
    torch.save({"model": held, "step": 4}, tmp_path / "file.pt")
    live = build()
    load(imported(tmp_path / "file.pt", tmp_path), {"model": live})
    check_scaled(live)
    assert torch.equal(live[0].weight, scaled[0].weight)


def test_a_folder_of_dcp_brings_it(scaled, tmp_path):
    dcp.save({"model": scaled.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    live = build()
    load(imported(tmp_path / "dcp", tmp_path), {"model": live})
    check_scaled(live)


@pytest.mark.parametrize("format", ["torch", "dcp"])
def test_it_is_exported_and_imported_again(scaled, format, tmp_path):  # noqa: A002
    path = save(tmp_path / "own", 1, {"model": scaled}).path
    export_checkpoint(path, tmp_path / "out.pt", format=format)
    live, theirs = build(), build()
    load(imported(tmp_path / "out.pt", tmp_path), {"model": live})
    check_scaled(live)
    if format == "torch":
        theirs.load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True)["model"])
        check_scaled(theirs)


@pytest.mark.parametrize("alone", [False, True])
def test_the_file_that_brought_it_comes_back_with_every_key_in_its_place(scaled, alone, tmp_path):
    held = scaled.state_dict()
    held["0._extra_state"] |= {"shape": torch.Size([2]), "dtype": torch.float8_e4m3fn, "window": [(1, 2.0), None]}
    held["0._extra_state"]["tied"] = held["0._extra_state"]["amax"]
    held["1.again"] = held["0.weight"]
    value = held if alone else {"model": held, "best": dict(held), "step": 4}
    torch.save(value, tmp_path / "file.pt")
    export_checkpoint(imported(tmp_path / "file.pt", tmp_path), tmp_path / "out.pt", format="torch")
    wanted, back = (torch.load(tmp_path / name, weights_only=True) for name in ("file.pt", "out.pt"))
    assert repr(back) == repr(wanted)
    back = back if alone else back["model"]
    assert (type(back), back._metadata) == (type(held), held._metadata)
    assert back["0._extra_state"]["tied"] is back["0._extra_state"]["amax"]
    assert back["1.again"] is back["0.weight"]


def test_safetensors_hold_it_where_it_is_a_tensor(packed, scaled, tmp_path):
    save_file(packed.state_dict(), tmp_path / "model.safetensors")
    path = imported(tmp_path / "model.safetensors", tmp_path)
    live = build(Packed)
    load(path, {"model": live})
    assert live[1].extra.tolist() == [7, 8, 9]
    export_checkpoint(path, tmp_path / "out")
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in again.items()} == {
        name: tensor.tolist() for name, tensor in packed.state_dict().items()
    }
    told = export_checkpoint(save(tmp_path / "own", 1, {"model": scaled}).path, tmp_path / "plain")
    assert told["notes"] == ["left out: 0._extra_state, 1._extra_state: safetensors stores only tensors"]


@pytest.mark.parametrize("shared", [lambda weight: weight, lambda weight: weight.detach(), lambda weight: weight[0]])
def test_safetensors_hold_it_also_where_it_shares_memory_with_a_parameter(shared, tmp_path):
    weight = torch.arange(4.0).reshape(2, 2)
    torch.save({"weight": weight, "_extra_state": shared(weight)}, tmp_path / "file.pt")
    told = export_checkpoint(imported(tmp_path / "file.pt", tmp_path), tmp_path / "out")
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert (told["tensors"], told["notes"]) == (2, [])
    assert torch.equal(back["weight"], weight)
    assert torch.equal(back["_extra_state"], shared(weight))


@pytest.mark.parametrize("told", [[5], {"0.": {"$tensor": "none"}}, {"0.": {"$tensor": ["model/0.weight"]}}])
def test_a_manifest_with_extra_state_of_no_known_form_is_damaged(told, scaled, tmp_path):
    path = Path(save(tmp_path / "own", 1, {"model": scaled}).path)
    text = json.loads((path / "MANIFEST.json").read_text())
    text["entries"]["model"]["tree"]["extra_state"] = told
    (path / "MANIFEST.json").write_text(json.dumps(text | {"digest": manifest_digest(text)}))
    ways = (
        lambda: load(path),
        lambda: load(path, {"model": build()}),
        lambda: export_checkpoint(path, tmp_path / "out"),
        lambda: export_checkpoint(path, tmp_path / "out.pt", format="torch"),
    )
    for way in ways:
        with pytest.raises(DamagedCheckpoint):
            way()


def test_what_only_a_class_understands_is_refused_by_name(tmp_path):
    held = {"w": torch.ones(2), "_extra_state": io.BytesIO(b"as Transformer Engine had it")}
    torch.save({"model": held}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match=r"file.pt/model/_extra_state is a _io\.BytesIO"):
        imported(tmp_path / "file.pt", tmp_path)

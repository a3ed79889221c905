"""Files of torch.save in its format before torch 1.6: read bit for bit, refused where they are damaged or hostile."""

import os
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn

from workers.checkpoint import load
from workers.checkpoint.exchange.importer import import_here
from workers.checkpoint.exchange.pickles.legacy_archive import MAGIC, MARK, is_legacy
from workers.errors import CheckpointError


def saved(value, path):
    torch.save(value, path, _use_new_zipfile_serialization=False)
    return path


def a_training():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(5, 4)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 12}


def loaded(path, root):
    told = import_here(str(path), str(root))
    return told, load(told["path"]).state


def test_a_training_is_imported_as_from_the_present_format(tmp_path):
    value = a_training()
    told, _ = loaded(saved(value, tmp_path / "old.pt"), tmp_path / "old")
    torch.save(value, tmp_path / "new.pt")
    other, _ = loaded(tmp_path / "new.pt", tmp_path / "new")
    assert (told["step"], told["tensors"], told["bytes"]) == (12, other["tensors"], other["bytes"])
    assert told["entries"] == other["entries"] and told["left_out"] == []


DTYPES = (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.bool, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_arrive_bit_for_bit_views_and_shared_ones_too(tmp_path, dtype):
    base = torch.arange(24).reshape(4, 6).to(dtype)
    value = OrderedDict(whole=base, view=base[1:3, ::2], turned=base.t(), again=base, none=base[:0], one=base[0, 0])
    _, have = loaded(saved(value, tmp_path / "x.pth"), tmp_path / "root")
    for name, tensor in value.items():
        assert torch.equal(have["model"][name], tensor) and have["model"][name].dtype == dtype, name


def test_the_format_is_known_by_its_first_bytes_whatever_the_file_is_called(tmp_path):
    path = saved({"w": torch.ones(2)}, tmp_path / "weights")
    assert is_legacy(path.read_bytes()[:16]) and MARK in pickle.dumps(MAGIC, 2)
    assert import_here(str(path), str(tmp_path / "root"))["format"] == "torch"


def cut(data, at):
    return data[:at]


def grown(data, at):
    return data + b"\0" * 8


def shrunk_storage(data, at):
    """The count before the last storage, of 64 elements, is another."""
    place = len(data) - 64 * 4 - 8
    return data[:place] + (63).to_bytes(8, "little") + data[place + 8 :]


@pytest.mark.parametrize("change", [cut, grown, shrunk_storage])
def test_a_file_that_is_cut_or_changed_is_refused(tmp_path, change):
    path = saved({"w": torch.rand(64)}, tmp_path / "x.pt")
    data = path.read_bytes()
    for at in (20, 60, len(data) // 2, len(data) - 1):
        path.write_bytes(change(data, at))
        with pytest.raises(CheckpointError, match=r"cut off|another size|storages end at|damaged"):
            import_here(str(path), str(tmp_path / "root"))
    assert list(tmp_path.glob("root/*")) == []


class Runs:
    def __reduce__(self):
        return os.system, ("touch /tmp/polyfleet-was-here",)


@pytest.mark.parametrize(
    "value", [{"w": torch.ones(2), "x": Runs()}, nn.Linear(2, 2)], ids=["a call", "a whole module"]
)
@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
def test_nothing_in_it_is_run_and_objects_are_refused_by_name(tmp_path, value):
    path = saved(value, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"system|Linear"):
        import_here(str(path), str(tmp_path / "root"))


def test_a_length_that_the_file_does_not_have_takes_no_memory(tmp_path):
    head = b"".join(pickle.dumps(part, 2) for part in (MAGIC, 1001, {"little_endian": True}))
    (tmp_path / "x.pt").write_bytes(head + b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b"x" * 100)
    with pytest.raises(CheckpointError, match="damaged or cut off"):
        import_here(str(tmp_path / "x.pt"), str(tmp_path / "root"))


@pytest.mark.parametrize(
    ("version", "machine", "why"),
    [(1000, {"little_endian": True}, "version 1000"), (1001, {"little_endian": False}, "big-endian"),
     (1001, [], "big-endian")],
)  # fmt: skip
def test_other_versions_and_machines_are_refused(tmp_path, version, machine, why):
    parts = (MAGIC, version, machine, {}, [])
    (tmp_path / "x.pt").write_bytes(b"".join(pickle.dumps(part, 2) for part in parts))
    with pytest.raises(CheckpointError, match=why):
        import_here(str(tmp_path / "x.pt"), str(tmp_path / "root"))

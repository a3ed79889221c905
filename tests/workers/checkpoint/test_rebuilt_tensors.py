"""Every argument with which a file of torch.save has a tensor rebuilt is honoured, or refused by name."""

import re
import shutil
import zipfile
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from workers.checkpoint import load, open_checkpoint
from workers.checkpoint.exchange.importer import import_here
from workers.checkpoint.exchange.pickles.strided import StridedSource
from workers.checkpoint.exchange.sources.formats import read
from workers.errors import CheckpointError

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
]

utils = torch._utils
from_array, from_tensor = utils._rebuild_device_tensor_from_numpy, utils._rebuild_device_tensor_from_cpu_tensor
X = torch.tensor([1 + 2j, 3 - 4j, -5 + 0j])
ONES = torch.ones(2)


class Rebuilt:
    """Pickled, it is a call of `function` with `arguments`; `state` is set afterwards."""

    def __init__(self, function, *arguments, state=None):
        self.what = (function, arguments, *([state] if state is not None else []))

    def __reduce__(self):
        return self.what


def imported(value, tmp_path, **options):
    torch.save({"value": {"n": 1, "v": value}}, tmp_path / "file.pt")
    shutil.rmtree(tmp_path / "root", ignore_errors=True)
    told = import_here(str(tmp_path / "file.pt"), str(tmp_path / "root"), **options)
    return load(told["path"]).state["value"]["v"], told


def refusal(value, tmp_path):
    torch.save({"value": {"n": 1, "v": value}}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError) as refused:
        read(tmp_path / "file.pt", "torch", drop=False)
    return str(refused.value)


def v2(tensor, *rest):
    return Rebuilt(utils._rebuild_tensor_v2, tensor._typed_storage(), 0, tuple(tensor.shape), tensor.stride(), *rest)


def test_marked_numbers_are_computed_and_are_no_tie_of_their_source(tmp_path):
    square = torch.randn(3, 3, dtype=torch.complex64)
    state = {
        "plain": X, "conj": X.conj(), "again": X.conj(), "negative": torch._neg_view(torch.randn(700).half()),
        "turned": square.conj().t(), "both": torch._neg_view(X.clone().conj()), "imaginary": X.clone().conj().imag,
    }  # fmt: skip
    torch.save(state, tmp_path / "file.pt")
    there = load(import_here(str(tmp_path / "file.pt"), str(tmp_path / "root"))["path"]).state["model"]
    assert [name for name, tensor in state.items() if not torch.equal(there[name], tensor)] == []
    assert there["conj"].data_ptr() != there["plain"].data_ptr()
    assert there["again"] is there["conj"]


@pytest.mark.parametrize("name", ["complex", "real", "turned"])
def test_signs_are_right_wherever_a_chunk_begins_and_ends(name, tmp_path):
    tensor = {"complex": X.conj(), "real": X.conj().imag, "turned": X.reshape(3, 1).expand(3, 2).conj()}[name]
    torch.save({"w": tensor}, tmp_path / "file.pt")
    wanted = tensor.resolve_conj().resolve_neg().contiguous().view(torch.uint8).numpy().tobytes()
    found = read(tmp_path / "file.pt", "torch", drop=False).references["model/w"]
    for at in range(len(wanted) + 1):
        halves = bytearray(at), bytearray(len(wanted) - at)
        source = StridedSource(found)
        source.read(0, at, memoryview(halves[0]))
        source.read(at, len(wanted), memoryview(halves[1]))
        assert bytes(halves[0] + halves[1]) == wanted


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (v2(X, False, OrderedDict(), {"conj": False}), "metadata has a bit that is not True"),
        (v2(X, False, OrderedDict(), {"other": True}), "metadata has more than the bits conj and neg"),
        (v2(ONES, False, OrderedDict(), {"conj": True}), "conj is set for float32"),
        (v2(torch.arange(2), False, OrderedDict(), {"neg": True}), "neg is set for int64"),
        (v2(ONES, False, OrderedDict(), {}, 1), "8 arguments; 6 to 7 are supported"),
        (v2(ONES, 1, OrderedDict()), "requires_grad is neither True nor False"),
        (v2(torch.arange(2), True, OrderedDict()), "int64 cannot require gradients"),
        (v2(ONES, False, OrderedDict({1: 2})), r"v\._backward_hooks is a backward hook of a tensor"),
        (Rebuilt(utils._rebuild_tensor, ONES._typed_storage(), 0, (2,), (1,), 5), "5 arguments; 4 to 4 are supported"),
        (Rebuilt(utils._rebuild_parameter_with_state, ONES, False, None, {"a": 1}), r"v\.a is a Python attribute"),
        (Rebuilt(from_tensor, ONES, torch.int8, "cpu", False), "values of float32 are declared as int8"),
        (Rebuilt(from_array, np.ones(2), torch.int8, "cpu", False), "values of float64 are declared as int8"),
        (Rebuilt(utils._rebuild_parameter, 5, False, None), "made of a int"),
        (lambda: torch.quantize_per_tensor(ONES, 0.1, 3, torch.qint8), "is a quantized tensor"),
        (lambda: torch.quantize_per_channel(torch.ones(2, 2), ONES, ONES, 0, torch.qint8), "is a quantized tensor"),
        (ONES.to_sparse(), "is a sparse tensor"),
        (lambda: torch.eye(2).to_sparse_csr(), "is a sparse tensor"),
        (ONES.to("meta"), "is a tensor on the meta device, without values"),
        (np.array([(1, 2.0)], dtype="i4,f4"), "numbers|fields"),
        (np.ones(2).view(np.recarray), "numpy"),
        (Rebuilt(torch.Size, ["a"]), "sizes are not integers"),
        (Rebuilt(torch.Size, [1], state={"a": 1}), r"torch\.Size \(with state set afterwards\)"),
    ],
)  # fmt: skip
def test_what_is_neither_numbers_nor_known_is_refused_by_name(value, said, tmp_path):
    message = refusal(value() if callable(value) else value, tmp_path)
    assert "file.pt/value/v" in message
    assert re.search(said, message), message


def test_what_a_tensor_has_beside_its_numbers_is_dropped_alone(tmp_path):
    weight = nn.Parameter(torch.arange(3.0))
    weight.partition_dim = 0
    assert "value/v.partition_dim is a Python attribute of a tensor" in refusal(weight, tmp_path)
    there, told = imported(weight, tmp_path, drop=True, step=1)
    assert torch.equal(there, weight)
    assert told["notes"] == [
        "dropped file.pt/value/v.partition_dim: a Python attribute of a tensor",
        "requires_grad of 1 tensors is not stored: the model they are loaded into sets it",
    ]


def test_tensors_of_two_dtypes_in_one_storage_keep_their_numbers_and_are_noted(tmp_path):
    data = torch.arange(16, dtype=torch.uint8)
    state = {"bytes": data, "words": data.view(torch.uint16), "same": data.view(torch.uint16)}
    torch.save(state, tmp_path / "file.pt")
    told = import_here(str(tmp_path / "file.pt"), str(tmp_path / "root"), step=1)
    there = load(told["path"]).state["model"]
    assert all(there[name].tolist() == tensor.tolist() for name, tensor in state.items())
    assert there["same"] is there["words"]
    assert told["notes"] == ["model/bytes and model/words share memory in the file; in the checkpoint each has its own"]


def test_equal_parts_of_a_storage_stay_tied_wherever_they_lie_in_it(tmp_path):
    data = torch.arange(10.0)
    square = torch.arange(4.0).reshape(2, 2)
    state = {"a": data[:6], "b": data[5:], "c": data[5:], "turned": square.t(), "again": square.t()}
    torch.save(state, tmp_path / "file.pt")
    there = load(import_here(str(tmp_path / "file.pt"), str(tmp_path / "root"))["path"]).state["model"]
    assert all(torch.equal(there[name], tensor) for name, tensor in state.items())
    assert there["c"] is there["b"]
    assert there["again"] is there["turned"]


def test_a_counter_stays_one_and_keys_that_would_become_one_are_refused(tmp_path):
    there, _ = imported(Counter("aab"), tmp_path)
    assert (type(there), there) == (Counter, Counter("aab"))
    assert "two keys that are equal as plain values" in refusal({torch.float32: 1, "float32": 2}, tmp_path)
    there, _ = imported({(torch.float16, torch.Size([2])): 1, frozenset([torch.int8]): 2}, tmp_path)
    assert there == {("float16", (2,)): 1, frozenset(["int8"]): 2}


def edited(path, old, new):
    """The pickle of a file of torch.save with some of its text replaced, and a CRC that fits."""
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data.replace(old, new) if name.endswith("data.pkl") else data)


@pytest.mark.parametrize("name", ["_rebuild_xla_tensor", "_rebuild_device_tensor_from_numpy"])
def test_tensors_that_older_torch_xla_wrote_are_read(name, tmp_path):
    """torch before 1.13 put values of tensors on XLA devices into the pickle, by numpy, bfloat16 as float32."""
    half = torch.tensor([1.5, -2.0, float("inf"), 3e-39]).bfloat16()
    held = {"w": torch.randn(2, 3), "half": half, "n": torch.tensor(7), "none": torch.empty(0, 2)}
    wide = {key: tensor.float() if tensor.dtype == torch.bfloat16 else tensor for key, tensor in held.items()}
    state = {key: Rebuilt(from_array, wide[key].numpy(), t.dtype, "xla:0", False) for key, t in held.items()}
    torch.save({"model": state, "step": 3}, tmp_path / "file.pt")
    edited(tmp_path / "file.pt", b"_rebuild_device_tensor_from_numpy", name.encode())
    told = import_here(str(tmp_path / "file.pt"), str(tmp_path / "root"))
    with open_checkpoint(told["path"]) as opened:
        entries = {key: opened.manifest.tensors[f"model/{key}"] for key in held}
    assert {(entry.role, entry.device) for entry in entries.values()} == {("parameter", "xla:0"), ("buffer", "xla:0")}
    there = load(told["path"]).state["model"]
    assert all(there[key].dtype == tensor.dtype and torch.equal(there[key], tensor) for key, tensor in held.items())


def test_a_step_that_older_torch_xla_wrote_is_read(tmp_path):
    step = Rebuilt(from_array, np.array(41), torch.int64, "xla:0", False)
    torch.save({"model": {"w": ONES}, "step": step}, tmp_path / "file.pt")
    assert import_here(str(tmp_path / "file.pt"), str(tmp_path / "root"))["step"] == 41


def test_values_that_a_dtype_cannot_hold_are_not_rounded(tmp_path):
    held = Rebuilt(from_array, np.float32([0.1]), torch.bfloat16, "xla:0", False)
    assert "float32 are declared as bfloat16, which cannot represent them all" in refusal(held, tmp_path)


def test_tensors_that_torch_xla_writes_now_keep_the_device_they_had(tmp_path):
    state = {"w": Rebuilt(from_tensor, torch.arange(3.0), torch.float32, "xla:1", True)}
    torch.save(state, tmp_path / "file.pt")
    told = import_here(str(tmp_path / "file.pt"), str(tmp_path / "root"))
    assert torch.equal(load(told["path"]).state["model"]["w"], torch.arange(3.0))
    with open_checkpoint(told["path"]) as opened:
        assert opened.manifest.tensors["model/w"].device == "xla:1"


@pytest.mark.parametrize("value", [b"", np.empty((0, 2), np.float32), {"a": b""}])
def test_no_bytes_at_all_are_values_too(value, tmp_path):
    there, _ = imported(value, tmp_path)
    assert type(there) is type(value)
    assert np.array_equal(there, value) if isinstance(value, np.ndarray) else there == value

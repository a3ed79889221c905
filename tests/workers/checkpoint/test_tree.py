import json
import math
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from workers.checkpoint import load, save
from workers.checkpoint.format.manifest import DamagedCheckpoint
from workers.checkpoint.format.tree import decode, encode, raise_unsupported
from workers.errors import CheckpointError

VALUES = [
    None, True, 0, -(2**53), 2**53 + 1, -(2**200), 0.1, -0.0, 5e-324, math.inf, -math.inf, "", "ü\ud800$", b"",
    b"\0\xff", 1 + 2j, complex(math.inf, -0.0), (), (1, (2, [3])), [], {}, {"a": {"b": None}},
    {1: "int", (2, 3): "tuple", None: 0}, {"$tensor": "not one"}, {"$x": 1, "y": 2}, {1, 2}, frozenset({"a"}),
    OrderedDict(b=1, a=2), Counter({2: 1, 5: 3}), np.float32(0.1), np.float64(math.pi), np.int64(-(2**63)),
    np.uint8(255), np.bool_(True), np.complex64(1 - 2j),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_with_its_type(value):
    tree = json.loads(json.dumps(encode(value, "x", raise_unsupported), allow_nan=False))
    back = decode(tree, raise_unsupported)
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_nan_and_the_order_of_keys_come_back():
    back = decode(json.loads(json.dumps(encode({"z": math.nan, "a": 1}, "x", raise_unsupported))), raise_unsupported)
    assert list(back) == ["z", "a"]
    assert math.isnan(back["z"])


def test_numpy_arrays_come_back_as_arrays(tmp_path):
    arrays = {
        "matrix": np.arange(6.0).reshape(2, 3).T,
        "scalar": np.array(3, dtype=np.int16),
        "empty": np.zeros((0, 2), dtype=np.complex128),
        "bools": np.array([True, False]),
        "unsigned": np.array([2**64 - 1], dtype=np.uint64),
        "big-endian": np.arange(3, dtype=">i4"),
    }
    save(tmp_path, 1, {"extra": arrays})
    loaded = load(tmp_path).state["extra"]
    for name, array in arrays.items():
        assert type(loaded[name]) is np.ndarray
        assert loaded[name].shape == array.shape
        assert loaded[name].dtype == array.dtype.newbyteorder("=")
        assert np.array_equal(loaded[name], array)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Path("x"), "extra/deep/0 is a pathlib"),
        (defaultdict(int), "extra/deep/0 is a collections.defaultdict"),
        (np.datetime64("2026-01-01"), "extra/deep/0 is a numpy.datetime64"),
        (np.array(["text"]), "extra/deep/0 is a numpy.ndarray"),
        (torch.float32, "extra/deep/0 is a torch.dtype"),
        (len, "extra/deep/0 is a builtins.builtin_function_or_method"),
    ],
)
def test_what_would_need_pickle_is_refused_by_name(value, said, tmp_path):
    with pytest.raises(CheckpointError, match=said) as refused:
        save(tmp_path, 1, {"extra": {"deep": [value]}})
    assert "lists, dicts, tensors" in refused.value.remedy


def test_a_value_that_contains_itself_is_refused(tmp_path):
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(CheckpointError, match="nested deeper than 100"):
        save(tmp_path, 1, {"extra": endless})


@pytest.mark.parametrize(
    "tree",
    [
        {"$unknown": 1}, {"$int": "ten"}, {"$int": 10}, {"$bytes": "%"}, {"$complex": ["1"]}, {"$scalar": ["O", "00"]},
        {"$scalar": ["<f8", "00"]}, {"$dict": [1]}, {"$dict": [[[1], 2]]}, {"$tuple": 1}, {"$float": []},
    ],
    ids=repr,
)  # fmt: skip
def test_a_malformed_leaf_is_damage_and_not_a_crash(tree):
    with pytest.raises(DamagedCheckpoint, match="malformed"):
        decode(tree, raise_unsupported)


def test_a_tree_deeper_than_any_we_write_is_damage():
    tree: object = 1
    for _ in range(150):
        tree = [tree]
    with pytest.raises(DamagedCheckpoint, match="nested deeper"):
        decode(tree, raise_unsupported)

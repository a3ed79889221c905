import stat
import warnings

import numpy as np
import pytest
import torch
from safetensors import safe_open

from workers.checkpoint import load, open_checkpoint, save
from workers.checkpoint.format.dtypes import DTYPES
from workers.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bit pattern: denormals, infinities and NaN with payloads among them."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_bit_for_bit_in_every_shape(name, tmp_path, bits):
    dtype = getattr(torch, name)
    state = {
        "plain": random_bits(dtype, 5, 7),
        "zero dimensions": random_bits(dtype, 1).reshape(()),
        "zero size": torch.empty((0, 3), dtype=dtype),
        "transposed": random_bits(dtype, 4, 6).t(),
        "strided": random_bits(dtype, 8, 6)[::2, 1:4],
    }
    save(tmp_path, 1, {"t": state})
    loaded = load(tmp_path).state["t"]
    assert bits(loaded) == bits(state)
    assert list(loaded) == list(state)


def test_all_dtypes_of_this_torch_are_known_but_the_quantized_ones():
    here = {str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)}
    assert {name for name in here if not name.startswith(("q", "quint"))} == set(DTYPES)


def test_memory_layout_comes_back(tmp_path):
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    volumes = torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d)
    save(tmp_path, 1, {"t": {"images": images, "volumes": volumes, "turned": torch.randn(3, 4).t()}})
    loaded = load(tmp_path).state["t"]
    assert loaded["images"].stride() == images.stride()
    assert loaded["volumes"].is_contiguous(memory_format=torch.channels_last_3d)
    assert loaded["turned"].stride() == (1, 4)
    assert torch.equal(loaded["images"], images)


def test_conjugates_expanded_and_integers_beyond_2_to_53_keep_their_values(tmp_path, bits):
    state = {
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "expanded": torch.arange(3.0).expand(4, 3),
        "large": torch.tensor([2**53 + 1, -(2**63)]),
    }
    save(tmp_path, 1, {"t": state})
    assert bits(load(tmp_path).state["t"]) == bits(state)


def test_a_tensor_held_twice_is_stored_once_and_comes_back_as_one(tmp_path):
    shared = torch.randn(3)
    saved = save(tmp_path, 1, {"a": {"x": shared}, "b": [shared, shared]})
    state = load(tmp_path).state
    assert state["a"]["x"] is state["b"][0] is state["b"][1]
    with open_checkpoint(saved.path) as opened:
        assert opened.names() == ["a/x"]


def test_paths_that_look_alike_are_different_tensors(tmp_path):
    save(tmp_path, 1, {"t": {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}}})
    state = load(tmp_path).state["t"]
    assert state["a/b"].item() == 0
    assert state["a"]["b"].item() == 1


def test_any_safetensors_tool_reads_the_shards(tmp_path):
    weights = torch.randn(4, 3)
    saved = save(tmp_path, 1, {"t": {"w": weights, "c": torch.ones(2, dtype=torch.complex128)}})
    with safe_open(saved.path / "shard-00001.safetensors", "pt") as shard:
        assert torch.equal(shard.get_tensor("t/w"), weights)
        assert shard.get_tensor("t/c").dtype == torch.uint8
        assert shard.metadata() == {"format": "pt"}


def test_a_large_state_is_split_into_shards(tmp_path, monkeypatch, bits):
    monkeypatch.setattr("workers.checkpoint.saving.saver.SHARD_BYTES", 1000)
    state = {"t": [torch.randn(100) for _ in range(7)] + [torch.randn(600)]}
    saved = save(tmp_path, 1, state)
    assert len(list(saved.path.glob("*.safetensors"))) == 5
    assert bits(load(tmp_path).state["t"]) == bits(state["t"])


def test_tensors_that_cross_chunks_come_back(tmp_path, bits):
    state = {"t": [torch.randn(3_000_000), torch.randn(5), torch.randn(2_500_000), torch.randn(7)]}
    saved = save(tmp_path, 1, state)
    assert bits(load(tmp_path).state["t"]) == bits(state["t"])
    with open_checkpoint(saved.path) as opened:
        assert torch.equal(opened.tensor("t/3"), state["t"][3])
        assert torch.equal(opened.tensor("t/0"), state["t"][0])


def test_others_may_read_what_the_umask_lets_them(tmp_path):
    saved = save(tmp_path, 1, {"t": torch.zeros(1)})
    reference = tmp_path / "reference"
    reference.touch()
    for path in saved.path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(reference.stat().st_mode)


def test_a_tensor_that_is_more_than_its_bytes_is_refused_by_name(tmp_path):
    class Marked(torch.Tensor):
        pass

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch itself calls quantized tensors deprecated
        quantized = torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)
    refused = {
        "sparse": torch.eye(3).to_sparse(),
        "without data": torch.empty(2, device="meta"),
        "quantized": quantized,
        "Marked": torch.zeros(2).as_subclass(Marked),
    }
    for why, tensor in refused.items():
        with pytest.raises(CheckpointError, match=f"(?s)t/strange.*{why}"):
            save(tmp_path, 1, {"t": {"strange": tensor}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"step": -1}, "step is -1"),
        ({"step": 1.0}, "step is 1.0"),
        ({"state": {"a/b": 1}}, "entry 'a/b'"),
        ({"state": {"": 1}}, "entry ''"),
        ({"keep": 0}, "keep is 0"),
        ({"attempt": "job"}, "attempt is 'job'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(wrong, said, tmp_path):
    arguments = {"step": 1, "state": {"t": 1}} | wrong
    with pytest.raises(CheckpointError, match=said):
        save(tmp_path / "root", **arguments)
    assert not (tmp_path / "root").exists()

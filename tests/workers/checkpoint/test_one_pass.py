"""Loading with verify="once": the same values as in two passes, the same damage found, half the bytes read."""

import random
from pathlib import Path

import pytest
import torch
from torch import nn

from workers.checkpoint import DamagedCheckpoint, load, save
from workers.checkpoint.disk.reader import CheckpointReader
from workers.checkpoint.format.manifest import CHUNK_BYTES
from workers.checkpoint.format.manifest_checks import box_bytes
from workers.checkpoint.loading.verifying_reader import VerifyingReader
from workers.errors import CheckpointError


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Beside tensors of a few bytes one that goes over three chunks, and one of rows that are longer than a buffer."""
    torch.manual_seed(1)
    return nn.ModuleList([nn.Linear(1200, 1700), nn.Linear(3, 3), nn.Linear(1 << 20, 2), nn.BatchNorm1d(7)]).to(dtype)


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    model = net()
    extra = {"double": torch.randn(70_000, dtype=torch.float64), "note": "x", "half": torch.randn(9).half()}
    state = {"model": model, "optim": stepped(model), "extra": extra, "rng": True}
    return save(tmp_path_factory.mktemp("saved"), 3, state).path


def live(dtype: torch.dtype) -> dict:
    model = net(dtype)
    return {"model": model, "optim": torch.optim.AdamW(model.parameters()), "rng": True}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_pass_loads_what_two_do(saved, bits, dtype):
    found = []
    for verify in ("chunks", "once"):
        into = live(dtype)
        loaded = load(saved, into, verify=verify, on_lossy="allow")
        found.append((bits(into["model"].state_dict()), bits(into["optim"].state_dict()), bits(loaded.state["extra"])))
        found[-1] += (loaded.report.as_dict(),)
    assert found[0] == found[1]


def test_plain_values_come_back_as_they_were(saved, bits):
    assert bits(load(saved, verify="once").state["model"]) == bits(net().state_dict() | load(saved).state["model"])
    told = []
    load(saved, verify="once", progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] > CHUNK_BYTES


def read_bytes() -> int:
    told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(told["rchar"])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="this system does not count what a process reads")
def test_one_pass_reads_every_byte_once(saved, monkeypatch):
    monkeypatch.setenv("POLYFLEET_NATIVE", "off")  # what it maps, the kernel does not count
    size_bytes = sum(path.stat().st_size for path in saved.glob("*.safetensors"))
    into, counted = live(torch.float32), {}
    for verify in ("chunks", "once"):
        before = read_bytes()
        load(saved, into, verify=verify)
        counted[verify] = read_bytes() - before
    shared = 3 * CHUNK_BYTES  # chunks that parameters share with states of the optimizer, and with random states
    assert size_bytes <= counted["once"] < size_bytes + shared
    assert counted["chunks"] > 1.9 * size_bytes


def flipped(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_flipped_bit_anywhere_in_what_is_loaded_is_found_and_named(saved, dtype):
    with CheckpointReader(saved) as reader:
        places = [
            (stored.file, stored.offset, stored.offset + size_bytes)
            for tensor in reader.manifest.stored().values()
            for stored in tensor.shards
            if (size_bytes := box_bytes(tensor, stored))
        ]
    chance = random.Random(7)
    for file, start, end in [*places, (places[0][0], 8, 200)]:  # the last: in the header of the file
        at = chance.randrange(start, end)
        flipped(saved / file, at)
        with pytest.raises(DamagedCheckpoint, match=rf"{file}: chunk {at // CHUNK_BYTES + 1} of \d+ is not what was"):
            load(saved, live(dtype), verify="once", on_lossy="allow")
        flipped(saved / file, at)
    load(saved, live(dtype), verify="once", on_lossy="allow")


def test_foreign_code_gets_nothing_that_is_not_proved(tmp_path):
    class Stateful:
        def __init__(self) -> None:
            self.got = None

        def state_dict(self) -> dict:
            return {"t": torch.arange(1000.0)}

        def load_state_dict(self, state: dict) -> None:
            self.got = state

    path = save(tmp_path, 1, {"mine": Stateful()}).path
    [shard] = path.glob("*.safetensors")
    flipped(shard, shard.stat().st_size - 1)
    mine = Stateful()
    with pytest.raises(DamagedCheckpoint):
        load(path, {"mine": mine}, verify="once")
    assert mine.got is None


def test_damage_is_told_before_a_loss_that_only_damaged_values_would_have(tmp_path):
    path = save(tmp_path, 1, {"t": torch.ones(9)}).path
    [shard] = path.glob("*.safetensors")
    flipped(shard, shard.stat().st_size - 4)  # the last bit of the last value: no bfloat16 has it
    with pytest.raises(DamagedCheckpoint, match="is not what was saved"):
        load(path, dtype={"float32": "bfloat16"}, verify="once")
    flipped(shard, shard.stat().st_size - 4)
    load(path, dtype={"float32": "bfloat16"}, verify="once")
    with pytest.raises(CheckpointError, match="use one of chunks, full, none, once"):
        load(path, verify="twice")


@pytest.mark.parametrize("seed", range(20))
def test_ranges_in_any_order_are_read_right_and_proved(tmp_path, seed):
    chance = random.Random(seed)
    path = save(tmp_path, 1, {"t": torch.randint(0, 255, (CHUNK_BYTES * 2 + 999,), dtype=torch.uint8)}).path
    [shard] = path.glob("*.safetensors")
    whole = shard.read_bytes()
    with VerifyingReader(path) as reader:
        for _ in range(30):
            start = chance.randrange(len(whole))
            out = bytearray(chance.randrange(min(len(whole) - start, 3 << 20) + 1))
            reader.read_into(shard.name, start, memoryview(out))
            assert out == whole[start : start + len(out)]
        reader.finish_verification()
    flipped(shard, at := chance.randrange(len(whole)))
    with VerifyingReader(path) as reader, pytest.raises(DamagedCheckpoint):
        reader.read_into(shard.name, at, memoryview(bytearray(1)))
        reader.finish_verification()

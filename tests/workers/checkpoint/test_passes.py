"""The compiled passes against xxhash and torch: the same hashes, the same bits, the same counts."""

import itertools
import os
import random
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import xxhash

from workers import native
from workers.checkpoint import load, save
from workers.checkpoint.conversion import passes
from workers.checkpoint.conversion.convert import check_convertible, put
from workers.checkpoint.conversion.load_report import ConversionLoss
from workers.checkpoint.disk.reader import CheckpointReader
from workers.checkpoint.format.dtypes import COMPLEX, FLOATS, INTEGERS
from workers.checkpoint.format.manifest import CHUNK_BYTES, DamagedCheckpoint
from workers.errors import CheckpointError

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="no C++ compiler here")
PAIRS = list(itertools.permutations(passes.CODES, 2))
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def compiled(home, monkeypatch):
    """For checkpoints of any size, and built once for this file."""
    monkeypatch.setenv("POLYFLEET_HOME", str(home))
    monkeypatch.delenv("POLYFLEET_NATIVE", raising=False)
    monkeypatch.setattr(passes, "MIN_BYTES", 0)
    found = passes.compiled_passes(0)
    assert found is not None, native.unavailable_reason()
    return found


def off(monkeypatch):
    monkeypatch.setenv("POLYFLEET_NATIVE", "off")


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def values_of(name: str) -> torch.Tensor:
    """All values of 16 bits; of the others every exponent, with significands at and about the ties of all narrower
    formats, and random bits. An odd number of them, so that the ends of vectors are met too."""
    dtype = getattr(torch, name)
    if dtype.itemsize == 2:
        return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    chance = np.random.default_rng(1)
    if name == "float32":
        tails = [0, 1, 0x7FFF, 0x8000, 0x8001, 0x17FFF, 0x18000, 0x18001, 0xFFF, 0x1000, 0x1001, 0x3000, 0x7FFFFF]
        made = [sign << 31 | exponent << 23 | tail for sign in (0, 1) for exponent in range(256) for tail in tails]
        made = np.array(made, np.uint32).view(np.int32)
        return torch.from_numpy(np.append(made, chance.integers(-(2**31), 2**31, 40_001, np.int32))).view(dtype)
    halves = [0, 1, 0xFFFFFFF, 0x10000000, 0x10000001, 0x30000000, 0x7FFF << 29, 0x8000 << 29, 0xFFF << 29, 1 << 51]
    made = [sign << 63 | exponent << 52 | tail for sign in (0, 1) for exponent in range(2048) for tail in halves]
    made = np.array(made, np.uint64).view(np.int64)
    drawn = chance.integers(-(2**63), 2**63 - 1, 40_001, np.int64)
    near_one = (chance.standard_normal(40_001) * 10.0 ** chance.integers(-45, 40, 40_001)).view(np.int64)
    return torch.from_numpy(np.concatenate([made, drawn, near_one])).view(dtype)


@pytest.mark.parametrize("source, target", PAIRS)
@pytest.mark.parametrize("kept", ["all values", "finite values", "ordinary values", "one NaN"])
def test_both_forms_give_the_same_bits_and_the_same_counts(source, target, kept, monkeypatch):
    before = values_of(source)
    if kept == "finite values":
        before = before[before.isfinite()]
    if kept == "ordinary values":  # nothing overflows: the fast way through
        before = before[(before.abs() < 6e4) & ((before.abs() > 1e-4) | (before == 0))]
    if kept == "one NaN":
        before = torch.randn(4099).to(getattr(torch, source))
        before[4097] = float("nan")
    mine, theirs = (torch.zeros(before.shape, dtype=getattr(torch, target)) for _ in range(2))
    ours = put(mine, before)
    off(monkeypatch)
    others = put(theirs, before)
    assert raw(mine) == raw(theirs)
    assert ours == others
    assert not (kept == "ordinary values" and (ours.new_inf or ours.new_nan))


@pytest.mark.parametrize("source, target", PAIRS)
@pytest.mark.parametrize("values", [[], [0.0], [-0.0], [float("inf")], [float("-inf")], [float("nan")], [0.1], [1e-45]])
def test_tensors_of_one_value_and_none_agree_too(source, target, values, monkeypatch):
    before = torch.tensor(values, dtype=torch.float64).to(getattr(torch, source))
    mine, theirs = (torch.ones(before.shape, dtype=getattr(torch, target)) for _ in range(2))
    ours = put(mine, before)
    off(monkeypatch)
    assert ours == put(theirs, before) and raw(mine) == raw(theirs)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("source, target", list(itertools.permutations((*FLOATS, *INTEGERS, *COMPLEX), 2)))
def test_every_pair_of_dtypes_answers_alike_with_and_without_compiled_code(source, target, monkeypatch):
    check_convertible("t", getattr(torch, source), getattr(torch, target))
    try:
        before = torch.tensor([0.0, 1.0, 2.0, 100.0, 0.5, 4.0]).to(getattr(torch, source))
        made = [torch.zeros(before.shape, dtype=getattr(torch, target)) for _ in range(2)]
        ours = put(made[0], before)
    except (RuntimeError, NotImplementedError) as e:
        off(monkeypatch)
        with pytest.raises(type(e)):
            put(torch.zeros(6, dtype=getattr(torch, target)), torch.ones(6).to(getattr(torch, source)))
        return
    off(monkeypatch)
    assert ours == put(made[1], before) and raw(made[0]) == raw(made[1])


def test_counts_are_what_they_say(monkeypatch):
    before = torch.tensor([1.0, 1.00390625, 3e38, -0.0, 1e-45, float("nan"), float("inf")])
    before[2] = torch.finfo(torch.float32).max
    change = put(torch.empty(7, dtype=torch.bfloat16), before)
    assert (change.values_changed, change.new_inf, change.new_nan) == (3, 1, 0)
    assert change.max_abs_error == 0.00390625 and change.max_rel_error == 1.0


@pytest.mark.parametrize("size", [241, 255, 256, 257, 319, 320, 1023, 1024, 1025, 1088, 4096, 65_536, 100_001])
def test_the_hash_is_that_of_the_reference_however_the_bytes_are_cut(size, compiled):
    chance = random.Random(size)
    data = memoryview(chance.randbytes(size))
    wanted = xxhash.xxh3_128(data).hexdigest()
    for _ in range(20):
        edges = [0, *sorted(chance.randrange(size + 1) for _ in range(6)), size]
        digest = compiled.digest()
        for start, stop in itertools.pairwise(edges):
            digest.update(data[start:stop])
        assert digest.hexdigest() == wanted


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("offset, size", [(0, 3_000_000), (1, 241), (4097, 1_234_567), (8, 262_144), (0, 0)])
def test_a_pass_over_a_file_reads_hashes_and_copies(offset, size, cached, compiled, tmp_path):
    path, data = tmp_path / "file", random.Random(1).randbytes(3_000_000)
    path.write_bytes(data)
    out = memoryview(bytearray(size + 64))
    with path.open("rb") as file:
        if not cached:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        digest = compiled.digest()
        digest.update(bytes(300))
        compiled.run(path, file.fileno(), offset, size, digest, out[:size])
    assert out[:size] == data[offset : offset + size] and out[size:] == bytes(64)
    assert digest.hexdigest() == xxhash.xxh3_128(bytes(300) + data[offset : offset + size]).hexdigest()


@pytest.mark.parametrize("wanted", [1_000_000, 9_000])
def test_a_file_that_ends_too_early_is_named_with_the_byte(wanted, compiled, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(5_000))
    message = "file ends at byte 5000 while it was being read"
    with path.open("rb") as file, pytest.raises(DamagedCheckpoint, match=message):
        compiled.run(path, file.fileno(), 100, wanted, compiled.digest())


def test_a_page_that_cannot_be_had_ends_the_attempt_and_not_the_process(compiled, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(random.Random(2).randbytes(3 << 20))
    before = signal.getsignal(signal.SIGBUS)
    with path.open("rb") as file:
        assert compiled.maps(file.fileno(), 0, 3 << 20)
        assert not compiled.maps(file.fileno(), 0, 5 << 20)  # beyond the end of the file: SIGBUS
        os.truncate(path, 1 << 20)
        with ThreadPoolExecutor(4) as pool:
            assert not any(pool.map(lambda _: compiled.maps(file.fileno(), 0, 3 << 20), range(16)))
        assert compiled.maps(file.fileno(), 0, 1 << 20)
    assert signal.getsignal(signal.SIGBUS) == before


def test_a_file_that_was_shortened_is_named_with_the_byte_each_time(compiled, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(random.Random(2).randbytes(CHUNK_BYTES))
    with path.open("rb") as file:
        os.truncate(path, CHUNK_BYTES // 2)
        for _ in range(3):
            with pytest.raises(DamagedCheckpoint, match=f"ends at byte {CHUNK_BYTES // 2}"):
                compiled.run(path, file.fileno(), 0, CHUNK_BYTES, compiled.digest())


def test_what_cannot_be_read_says_why(compiled, tmp_path):
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(DamagedCheckpoint, match="cannot be read at byte 7: Is a directory"):
            compiled.run(tmp_path, descriptor, 7, 1000, compiled.digest())
    finally:
        os.close(descriptor)


STATE = {
    "t": {
        "small": torch.linspace(-1, 1, 7),
        "wide": torch.randn(1_000_003, dtype=torch.float64),
        "matrix": torch.randn(1500, 1501),
        "half": torch.randn(3_000_001).to(torch.bfloat16),
        "none": torch.empty(0, 4),
        "turned": torch.randn(300, 200).T,
        "count": torch.arange(10),
    }
}


@pytest.mark.parametrize("verify", ["chunks", "full", "once", "none"])
@pytest.mark.parametrize("to", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("on_lossy", ["allow", "error"])
def test_a_load_answers_alike_with_and_without_compiled_code(verify, to, on_lossy, tmp_path, monkeypatch):
    save(tmp_path, 1, STATE)
    asked = {"dtype": dict.fromkeys(passes.CODES, to), "verify": verify, "on_lossy": on_lossy}

    def outcome():
        try:
            loaded = load(tmp_path, **asked)
        except CheckpointError as e:
            return str(e)
        return {name: raw(t) for name, t in loaded.state["t"].items()}, loaded.report.as_dict()

    ours = outcome()
    off(monkeypatch)
    assert ours == outcome()


@pytest.mark.parametrize("verify", ["chunks", "once"])
def test_a_flipped_bit_is_found_in_a_load_that_converts(verify, tmp_path):
    save(tmp_path, 1, STATE)
    (shard,) = tmp_path.rglob("*.safetensors")
    with shard.open("r+b") as file:
        file.seek(-100_000, os.SEEK_END)
        byte = file.read(1)
        file.seek(-100_000, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(DamagedCheckpoint, match=r"chunk \d+ of \d+ is not what was saved"):
        load(next(tmp_path.glob("step-*")), dtype={"bfloat16": "float32"}, on_lossy="allow", verify=verify)


def test_one_pass_passes_over_each_byte_once(tmp_path, monkeypatch):
    save(tmp_path, 1, {"t": {"a": torch.ones(5_000_000), "b": torch.ones(3_000_001, dtype=torch.bfloat16)}})
    taken, over = [], passes.Passes.run
    monkeypatch.setattr(passes.Passes, "run", lambda self, *given: (taken.append(given[2:4]), over(self, *given))[1])
    load(tmp_path, dtype={"bfloat16": "float32"}, verify="once")
    size_bytes = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert sum(size for _, size in taken) == size_bytes
    taken.clear()
    load(tmp_path, dtype={"bfloat16": "float32"}, verify="chunks")
    assert size_bytes < sum(size for _, size in taken) < 2 * size_bytes  # the same dtype is filled by the kernel


def test_a_save_writes_the_same_bytes_and_hashes_with_and_without_compiled_code(tmp_path, monkeypatch):
    found = []
    for form in ("compiled", "off"):
        if form == "off":
            off(monkeypatch)
        save(tmp_path / form, 1, STATE)
        with CheckpointReader(next((tmp_path / form).glob("step-*"))) as reader:
            shards = {path.name: path.read_bytes() for path in reader.folder.glob("*.safetensors")}
            found.append((reader.manifest.files, shards))
    assert found[0] == found[1]


def test_a_save_waits_for_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(native, "_libraries", {})
    save(tmp_path / "root", 1, STATE)
    assert not list((tmp_path / "home").rglob("*.so"))
    load(tmp_path / "root")
    assert list((tmp_path / "home").rglob("checkpoint-*.so"))


def test_small_checkpoints_build_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(passes, "MIN_BYTES", 1 << 20)
    save(tmp_path, 1, {"t": torch.ones(1000)})
    with CheckpointReader(next(tmp_path.glob("step-*"))) as reader:
        assert reader.native is None


def test_a_change_adds_up_over_parts(compiled):
    values = torch.tensor([0.1, 0.2, 1e30], dtype=torch.float64)
    out = torch.empty(3, dtype=torch.float32)
    names = ("float64", "float32")
    parts = [compiled.convert(values[i:].data_ptr(), out[i:].data_ptr(), 1, names, True) for i in range(3)]
    assert sum(parts, ConversionLoss()) == put(torch.empty(3, dtype=torch.float32), values)

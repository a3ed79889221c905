"""Checkpoints that strangers made: each costs bounded time and memory, is refused with a sentence and leaves nothing.

What a reader takes is measured in the process that reads, above what the same process has when its libraries are
loaded.
"""

import json
import os
import pickle
import struct
import subprocess
import sys
import threading
import zipfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # children of these tests import this file

from patience import LIMIT_S, wait_for

from cluster.errors import PolyfleetError, UserError
from workers.checkpoint.format.boxes import Box, full_box, tiling_fault
from workers.checkpoint.format.manifest import NAME, manifest_digest
from workers.checkpoint.format.manifest_checks import parse_manifest
from workers.checkpoint.tools import run_in_child
from workers.errors import CheckpointError
from workers.storage.checkpoint_tools import CheckpointTools
from workers.storage.checkpoint_uploads import CheckpointUploads
from workers.storage.pool_checkpoints import PoolCheckpoints
from workers.storage.pool_storage import PoolStorage

MOST_BYTES = 256 << 20
ALONE = """
import json, resource, sys
from importlib import import_module
module, name, argument = sys.argv[1:]
function = getattr(import_module(module), name)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    function(argument)
    said = ""
except Exception as e:
    said = f"{type(e).__name__}: {e}"
print(json.dumps([said[:2000], (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10]))
"""


def alone(function, argument):
    """What it said, and the bytes it took, of a function of one path in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE, function.__module__, function.__name__, str(argument)],
        capture_output=True, text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    said, taken_bytes = json.loads(done.stdout)
    assert taken_bytes < MOST_BYTES
    return said


def parsed(path):
    return alone(read_text, path)


def read_text(path):
    parse_manifest(Path(path).read_bytes(), "manifest")


class Peak:
    """The most memory that children of this process had at once, each above `baseline` bytes."""

    def __init__(self):
        self.bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def _watch(self):
        """A reader that was found is asked alone: a look at all processes takes 2 ms of a CPU."""
        reader = 0
        while not self._over.wait(0.002):
            try:
                reader = reader or next((child.pid for child in readers()), 0)
                if reader:
                    status = Path(f"/proc/{reader}/status").read_text()
                    self.bytes = max(self.bytes, int(status.partition("VmHWM:")[2].split()[0]) << 10)
            except (OSError, IndexError):  # it has ended
                reader = 0


LIBRARIES_BYTES = 48 << 20
"""A reader without any file has 36 MiB."""


def refused(source, root, **options):
    """The sentence with which the import of `source` is refused."""
    arguments = {"source": str(source), "root": str(root), "format": "", "step": None, "drop": False} | options
    with Peak() as peak, pytest.raises(CheckpointError) as error:
        run_in_child("import", arguments)
    assert peak.bytes < LIBRARIES_BYTES + MOST_BYTES
    assert not root.exists() or not list(root.iterdir())
    return str(error.value)


def manifest(tensors, size_bytes=1 << 20, **more):
    hashes = ["0" * 32] * -(-size_bytes // (8 << 20))
    data = {
        "format": "polyfleet-checkpoint", "version": 2, "step": 1, "created": "", "producer": {}, "world": {},
        "files": {"a.safetensors": {"bytes": size_bytes, "xxh3_128": hashes}}, "tensors": tensors, "entries": {},
    } | more  # fmt: skip
    data["digest"] = manifest_digest(data)
    return json.dumps(data, separators=(",", ":")).encode()


def tensor(**more):
    return {"role": "tensor", "dtype": "uint8", "shape": [], "shards": [{"file": "a.safetensors", "offset": 8}]} | more


def in_columns(count):
    """One tensor whose parts all share their rows."""
    parts = [{"file": "a.safetensors", "offset": 8 + i, "start": [0, i], "shape": [1, 1]} for i in range(count)]
    return {"m/w": tensor(shape=[1, count], shards=parts)}


def test_one_tensor_in_many_parts_takes_no_longer_than_many_tensors(tmp_path):
    (tmp_path / NAME).write_bytes(manifest(in_columns(10_000)))
    assert parsed(tmp_path / NAME) == ""
    broken = in_columns(10_000)
    broken["m/w"]["shards"][5_000]["start"][1] = 7
    (tmp_path / NAME).write_bytes(manifest(broken))
    assert "has shards that overlap" in parsed(tmp_path / NAME)


def test_a_manifest_of_too_many_parts_tensors_or_files_is_refused_before_it_is_followed(monkeypatch):
    checks = sys.modules["workers.checkpoint.format.manifest_checks"]
    for limit in ("MAX_PARTS_PER_TENSOR", "MAX_TENSORS", "MAX_FILES"):
        assert getattr(checks, limit) >= 65_536
        monkeypatch.setattr(checks, limit, 3)
    files = {f"{i}.safetensors": {"bytes": 8, "xxh3_128": ["0"]} for i in range(4)}
    for data, said in [
        (manifest(in_columns(4)), "has 4 parts, at most 3 are read"),
        (manifest({f"m/{i}": tensor() for i in range(4)}), "it has 4 tensors, at most 3 are read"),
        (manifest({}, files=files), "it lists 4 files, at most 3 are read"),
        (b'{"a":[' + b"[]," * 8_000_001 + b"[]]}", "more than 8000000 lists and objects"),
        (b'{"a":["\xff"]}', "is not ASCII"),
    ]:
        with pytest.raises(CheckpointError, match=said):
            parse_manifest(data, "manifest")


@pytest.mark.parametrize("wrong", ["16", True, 1.9, 16.0, None, [16], {}])
def test_a_whole_number_in_a_manifest_is_nothing_else(wrong):
    for data in (
        manifest({}, step=wrong),
        manifest({}, files={"a.safetensors": {"bytes": wrong, "xxh3_128": ["0"]}}),
        manifest({"m/w": tensor(shape=[wrong])}),
        manifest({"m/w": tensor(shards=[{"file": "a.safetensors", "offset": wrong}])}),
        manifest({"m/w": tensor(alias_of="m/x", view={"offset": wrong, "strides": []}), "m/x": tensor()}),
        manifest({}, world={"size": wrong}),
    ):
        with pytest.raises(CheckpointError, match="expected a"):
            parse_manifest(data, "manifest")


def test_numbers_beyond_64_bits_are_refused_in_a_manifest_and_a_header():
    for huge in (10**400, -(10**400), 2**63):
        for data in (manifest({}, step=huge), manifest({"m/w": tensor(shape=[huge])})):
            with pytest.raises(CheckpointError):
                parse_manifest(data, "manifest")


def test_parts_are_found_to_tile_or_not_in_any_number_of_dimensions():
    outer = full_box((4, 6, 2, 5))
    cells = [Box((a, b, c, d), (2, 3, 1, 5)) for a in (0, 2) for b in (0, 3) for c in (0, 1) for d in (0,)]
    assert tiling_fault(outer, cells) == ""
    assert tiling_fault(outer, [*cells, Box((1, 1, 1, 1), (0, 1, 1, 1))]) == ""  # an empty part covers nothing
    assert tiling_fault(outer, cells[1:]) == "has shards with 210 of its 240 values"
    moved = [*cells[:-1], Box((2, 3, 0, 0), (2, 3, 1, 5))]
    assert tiling_fault(outer, moved) == "has shards that overlap, from [2, 3, 0, 0] and from [2, 3, 0, 0] on"
    assert tiling_fault(outer, [*cells, cells[0]]).startswith("has shards that overlap")
    assert tiling_fault(full_box(()), [full_box(())]) == ""
    assert tiling_fault(full_box((3, 0)), []) == ""


@pytest.fixture
def storage(tmp_path):
    return PoolStorage(tmp_path / "storage")


def large_manifest():
    """Of 5 MiB, which an agent does not read itself."""
    return manifest({f"m/{'x' * 500}{i}": tensor(role="rng", alias_of="m/x") for i in range(9_000)} | {"m/x": tensor()})


def test_an_agent_has_a_large_manifest_read_by_a_process_of_its_own(storage, tmp_path, monkeypatch):
    name, text = "step-00000001-00000000", large_manifest()
    folder = storage.make_folder(f"jobs/{name}")
    (folder / NAME).write_bytes(text)
    (folder / "a.safetensors").write_bytes(b"\0" * (1 << 20))
    stored = PoolCheckpoints(storage)

    def here(*_):
        raise AssertionError("read in the agent")

    monkeypatch.setattr("workers.checkpoint.format.manifest_checks._parse", here)
    assert stored.list("")[0]["tensors"] == 1
    assert stored.describe(f"jobs/{name}")["step"] == 1
    assert stored.resolve("jobs")["path"] == f"jobs/{name}"
    with pytest.raises(CheckpointError, match="chunk 1 of 1 is not what was saved"):
        stored.verify(f"jobs/{name}")
    with pytest.raises(PolyfleetError, match="none of the 1 checkpoints"):
        stored.resolve("jobs")
    incoming = CheckpointUploads(PoolStorage(tmp_path / "other"))
    assert incoming.begin("here", name, text)["missing"] == [["a.safetensors", 0]]
    incoming.close("here", name)


def test_a_listing_of_faults_takes_as_long_as_its_files_not_as_files_times_tensors(storage):
    files = {f"{i}.safetensors": {"bytes": 16, "xxh3_128": ["0" * 32]} for i in range(12_000)}
    tensors = {f"m/{i}": tensor(shards=[{"file": f"{i}.safetensors", "offset": 8}]) for i in range(12_000)}
    folder = storage.make_folder("step-00000001-00000000")
    (folder / NAME).write_bytes(manifest(tensors, files=files))
    for name in files:
        (folder / name).write_bytes(b"short")
    said = alone(verify_all, folder)
    assert said == "", said


def verify_all(folder):
    from workers.checkpoint.disk.inspect import verify

    problems = verify(folder)["problems"]
    assert len(problems) == 12_000, problems[:2]


def torch_file(path, pickled, *, storage=b"\0" * 8, compress=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compress) as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/data/0", storage)
    return path


def op(text):
    return b"\x80\x02" + text + b"."


def doubled(count, make):
    """A value that holds the one before twice, and so on: the last has 2^count inside."""
    return b"".join(make(i) for i in range(count))


TUPLES = b")q\x00" + doubled(60, lambda i: b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]))
LISTS = b"]q\x00" + doubled(60, lambda i: b"](h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1]))
LATE = (  # lists that are filled after they were remembered: at first none holds anything
    b"".join(b"]q" + bytes([i]) + b"0" for i in range(60))
    + b"".join(b"h" + bytes([i + 1]) + b"(h" + bytes([i]) + b"h" + bytes([i]) + b"e0" for i in range(59))
    + b"}X\x01\x00\x00\x00xh\x3bs"
)
NAMESPACES = b"Nq\x00" + doubled(
    60,
    lambda i: (
        b"cargparse\nNamespace\n)R}(X\x01\x00\x00\x00ah" + bytes([i]) + b"X\x01\x00\x00\x00bh" + bytes([i])
        + b"ubq" + bytes([i + 1])
    ),
)  # fmt: skip
PICKLES = {
    "a place in the memo far beyond all others": (op(b"Nr\xff\xff\xff\x04"), "puts value 83886079 into its memo"),
    "a text that is not there": (b"\x80\x05\x96" + struct.pack("<Q", 700 << 20) + b"x.", "is not a pickle"),
    "tuples of tuples": (op(TUPLES), "repeats nested values"),
    "tuples of tuples for a key": (op(TUPLES + b"}h\x3cNs"), "repeats nested values"),
    "lists of lists": (op(LISTS), "repeats nested values"),
    "lists that are filled later": (op(LATE), "has many more values than its size allows"),
    "objects of objects": (op(NAMESPACES), "repeats nested values"),
    "a list that holds itself": (op(b"]q\x00h\x00a"), "is nested deeper than 100; check that it does not"),
    "nested very deep": (op(b"]" * 100_000 + b"a" * 99_999), "is nested more than 200 times"),
    "tuples nested very deep": (op(b"}" + b")" + b"\x85" * 100_000 + b"Ns"), "is nested more than 200 times"),
    "a hundred thousand classes": (
        op(b"(" + b"".join(b"ca\n%d\n" % i for i in range(100_000)) + b"l"), "names more than 1000 classes"),
    "one array ten thousand times": (
        op(b"(" + b"X\x00\x00\x10\x00" + b"x" * (1 << 20) + b"q\x000" + b"".join(
            b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R" for _ in range(10_000)) + b"l"),
        "has many more values than its size allows"),
    "one text a million times": (
        op(b"X\x00\x00\x10\x00" + b"x" * (1 << 20) + b"q\x000(" + b"h\x00" * 500_000 + b"l"),
        "has many more values than its size allows"),
    "a size that is text": (op(b"X\x01\x00\x00\x00x(X\x07\x00\x00\x00storageNNNNtQ"), "refers to a storage"),
    "methods that were replaced": (
        op(b"ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsK\x01sb"), "contains no tensors|expected|cannot be"),
}  # fmt: skip


@pytest.mark.parametrize("what", PICKLES)
def test_a_small_pickle_cannot_ask_for_much(what, tmp_path):
    pickled, said = PICKLES[what]
    told = refused(torch_file(tmp_path / "x.pt", pickled), tmp_path / "root")
    assert any(part in told for part in said.split("|")), told


def test_a_reader_that_takes_too_long_is_ended_by_its_own_limits(tmp_path):
    script = "from cluster.input import sandbox; sandbox.CPU_S = 0; sandbox.apply_limits()\nwhile True: pass"
    done = subprocess.run([sys.executable, "-c", script], timeout=LIMIT_S)
    from cluster.input.sandbox import limit_message

    assert limit_message(done.returncode) == "it took much longer than files of its size do"
    script = "from cluster.input import sandbox; sandbox.isolate(); sandbox.apply_limits(); bytearray(400 << 20)"
    done = subprocess.run([sys.executable, "-c", script], timeout=LIMIT_S, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "MemoryError"


def test_a_compressed_archive_is_refused_before_it_is_inflated(tmp_path):
    bomb = torch_file(tmp_path / "x.pt", bytes(320 << 20), compress=zipfile.ZIP_DEFLATED)
    assert bomb.stat().st_size < 1 << 20
    assert "a/data.pkl is compressed, which torch.save never does" in refused(bomb, tmp_path / "root")


def test_an_archive_whose_entries_overlap_is_refused_before_they_are_read(tmp_path):
    path = torch_file(tmp_path / "x.pt", op(b"}"), storage=b"\0" * (4 << 20))
    with zipfile.ZipFile(path, "a") as archive:
        first = archive.getinfo("a/data/0")
        for i in range(1, 1000):
            again = zipfile.ZipInfo(f"a/data/{i}")
            for name in ("header_offset", "CRC", "compress_size", "file_size"):
                setattr(again, name, getattr(first, name))
            archive.filelist.append(again)
        archive._didModify = True
    assert "has entries that overlap" in refused(path, tmp_path / "root")


def test_an_archive_with_a_list_of_entries_without_end_is_not_read(tmp_path):
    path = torch_file(tmp_path / "x.pt", op(b"}"))
    with path.open("r+b") as file:
        file.truncate(900 << 20)  # sparse
        file.seek(0, 2)
        file.write(struct.pack("<4sHHHHLLH", b"PK\x05\x06", 0, 0, 1, 1, 899 << 20, 1 << 10, 0))
    assert "is damaged: its list of entries has" in refused(path, tmp_path / "root")


def expanded(path, shape, strides, stored=b"\0" * 8):
    """A file whose one tensor repeats the bytes it has."""
    import torch

    class Persistent(pickle.Pickler):
        def persistent_id(self, value):
            return ("storage", torch.FloatStorage, "0", "cpu", len(stored) // 4) if value == "here" else None

    class Rebuilt:
        def __reduce__(self):
            return torch._utils._rebuild_tensor_v2, ("here", 0, shape, strides, False, {})

    with (path.parent / "pickled").open("wb") as file:
        Persistent(file, 2).dump({"w": Rebuilt()})
    return torch_file(path, (path.parent / "pickled").read_bytes(), storage=stored)


def test_an_expanded_tensor_writes_no_more_than_its_file_can_mean(tmp_path):
    said = refused(expanded(tmp_path / "x.pt", (12_000, 12_000), (0, 0)), tmp_path / "root")
    assert "would take 549 MiB and are made of 0.00 MiB (model/w: 549 MiB); at most 16 times as much is written" in said
    assert ".contiguous()" in said
    huge = refused(expanded(tmp_path / "y.pt", (2**32, 2**32), (0, 0)), tmp_path / "root")
    assert "at most 16 times as much is written" in huge


def test_a_small_expanded_tensor_comes_in_whole(tmp_path):
    import torch

    from workers.checkpoint import import_checkpoint, load

    state = {"mask": torch.tensor([[1.0], [2.0]]).expand(2, 300), "turned": torch.arange(4000.0).view(40, 100).t()}
    torch.save(state, tmp_path / "x.pt")
    there = load(import_checkpoint(tmp_path / "x.pt", tmp_path / "root")["path"]).state["model"]
    assert all(torch.equal(there[name], held) for name, held in state.items())


def test_a_transposed_tensor_over_many_chunks_comes_in_bit_for_bit(tmp_path):
    import torch

    from workers.checkpoint import import_checkpoint, load

    made = torch.Generator().manual_seed(1)
    state = {
        "turned": torch.randn(1500, 3001, generator=made).t(),
        "cube": torch.randn(70, 130, 300, generator=made).permute(2, 0, 1)[5:, ::2],
        "wide": torch.randn(900, 1100, generator=made, dtype=torch.float64).to(torch.complex128).t(),
        "bytes": torch.randint(0, 255, (5000, 1999), generator=made, dtype=torch.uint8).t(),
    }
    torch.save(state, tmp_path / "x.pt")
    there = load(import_checkpoint(tmp_path / "x.pt", tmp_path / "root")["path"]).state["model"]
    assert all(torch.equal(there[name], held) for name, held in state.items())


def header(told, data=b"\0" * 64):
    text = told if isinstance(told, bytes) else json.dumps(told).encode()
    return struct.pack("<Q", len(text)) + text + data


HELD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "told",
    [
        {"t": HELD | {"shape": ["2"]}},
        {"t": HELD | {"shape": [2.0]}},
        {"t": HELD | {"shape": [True, 2]}},
        {"t": HELD | {"data_offsets": [0.0, 8]}},
        {"t": HELD | {"data_offsets": ["0", "8"]}},
        {"t": HELD | {"data_offsets": [False, 8]}},
        {"t": HELD | {"shape": {"2": 2}}},
        {"t": HELD | {"shape": [10**400]}},
        {"t": HELD | {"dtype": ["F32"]}},
        {"t": [1, 2]},
        [HELD],
        b'{"t": ' + json.dumps(HELD).encode() + b', "t": ' + json.dumps(HELD).encode() + b"}",
        b"{" + b'"t":{"dtype":"F32","shape":[],"data_offsets":[0,4]},' * 600_000 + b'"u":1}',
        b'{"t":' + b"[[]," * 3_000_000 + b"1",
    ],
)
def test_a_safetensors_header_is_taken_exactly(told, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(header(told))
    assert "is not valid" in refused(tmp_path / "x.safetensors", tmp_path / "root")


def test_index_files_that_are_pipes_folders_or_without_end_are_refused(tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    index = folder / "model.safetensors.index.json"
    for make, undo, said in [
        (lambda: os.mkfifo(index), index.unlink, "is not a regular file"),
        (lambda: index.symlink_to("/dev/zero"), index.unlink, "cannot be opened"),
        (lambda: (index.touch(), os.truncate(index, 1 << 40)), index.unlink, "is longer than the limit"),
        (lambda: index.write_text("[" * 1_000_000), index.unlink, "is nested more than"),
        (lambda: index.write_text('{"weight_map": {"a": 1}}'), index.unlink, "it has no weight_map"),
        (index.mkdir, index.rmdir, "is not a regular file"),
    ]:
        make()
        assert said in refused(folder, tmp_path / "root")
        undo()
    dcp = tmp_path / "dcp"
    dcp.mkdir()
    (dcp / ".metadata").touch()
    os.truncate(dcp / ".metadata", 1 << 40)
    assert "is longer than the limit" in refused(dcp, tmp_path / "root")


def readers():
    """Not before each is another program than these tests: until then it has their memory."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # one that ends just now
            found += [child] if "workers.checkpoint" in " ".join(child.cmdline()) else []
    return found


def slow_import(storage):
    """Arguments of an import that reads for minutes before it tells anything: 50 GB that are not there."""
    folder = storage.make_folder("in")
    path = torch_file(folder / "x.pt", op(b"}"))
    with zipfile.ZipFile(path, "a", allowZip64=True) as archive:
        start = archive.start_dir
        info = zipfile.ZipInfo("a/data/1")
        info.header_offset, info.CRC, info.compress_size, info.file_size = start, 0, 50 << 30, 50 << 30
        with path.open("r+b") as file:
            file.seek(start)
            file.write(info.FileHeader(zip64=True))
            data = file.tell()
            file.truncate(data + (50 << 30))
        archive.filelist.append(info)
        archive.start_dir = data + (50 << 30)
        archive._didModify = True
    return {
        "source": {"pool": "cpu", "path": "in/x.pt"},
        "root": {"pool": "cpu", "path": "out"},
        "format": "torch",
    }


def cpu_s(process):
    """Most of it is the system's: it reads."""
    times = process.cpu_times()
    return times.user + times.system


def wait_for_reader(look=lambda: None):
    def at_work():
        look()
        return [reader for reader in readers() if cpu_s(reader) > 0.6]

    return wait_for(at_work, "no reader started")[0]


def test_a_tool_that_tells_nothing_ends_with_its_client(storage):
    tools = CheckpointTools(storage, "cpu", lambda pool: storage)
    number = tools.start("import", slow_import(storage))
    reader = wait_for_reader()
    reader.suspend()  # it need not read on while it is waited for
    assert tools.poll(number, 0, 0.1)["progress"] is None
    tools.stop(number)
    reader.wait(timeout=LIMIT_S)


def test_a_tool_that_nobody_asks_about_ends_by_itself(storage):
    tools = CheckpointTools(storage, "cpu", lambda pool: storage, forget_after_s=3.0)
    number = tools.start("import", slow_import(storage))
    reader = wait_for_reader(lambda: tools.poll(number, 0, 0.0))
    reader.suspend()
    reader.wait(timeout=LIMIT_S)
    with pytest.raises(UserError, match="the tool was stopped"):
        tools.poll(number, 0, 1.0)


def test_a_reader_dies_with_whoever_started_it(storage, tmp_path):
    arguments = {"source": str(tmp_path / "storage/in/x.pt"), "root": str(tmp_path / "out"), "format": "torch"}
    slow_import(storage)
    script = f"from workers.checkpoint.tools import run_in_child; run_in_child('import', {arguments!r})"
    with subprocess.Popen([sys.executable, "-c", script]) as client:
        try:
            [child] = wait_for(psutil.Process(client.pid).children, "no reader started")
            wait_for(lambda: cpu_s(child) > 0.6)
        finally:
            client.kill()
    child.wait(timeout=LIMIT_S)

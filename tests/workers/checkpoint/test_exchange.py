"""Import and export, with files that others really write, and files that somebody made to hurt."""

import errno
import io
import json
import os
import pickle
import platform
import socket
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from lazy_modules import LazyModule
from patience import LIMIT_S
from safetensors.torch import load_file, save_file
from torch import nn

from cluster.errors import NotFound, UserError
from cluster.input import sandbox
from workers.checkpoint import export_checkpoint, import_checkpoint, load, open_checkpoint, save, verify
from workers.checkpoint.exchange.pickles import pickle_symbols
from workers.checkpoint.exchange.pickles.pickle_values import PickleDecoder
from workers.checkpoint.exchange.pickles.torch_archive import Archive
from workers.checkpoint.exchange.sources.formats import read
from workers.errors import CheckpointError

dcp = LazyModule("torch.distributed.checkpoint")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def imported(source, root, **options):
    return load(import_checkpoint(source, root, **options)["path"])


@pytest.fixture
def weights():
    torch.manual_seed(0)
    return {"a.weight": torch.randn(300, 7), "a.bias": torch.randn(7).half(), "n": torch.arange(5)}


def test_safetensors_are_linked_not_copied_and_may_stay_where_they_are(weights, tmp_path):
    save_file(weights, tmp_path / "model.safetensors")
    told = import_checkpoint(tmp_path / "model.safetensors", tmp_path / "root", step=5)
    assert (told["copied_bytes"], told["step"], told["format"]) == (0, 5, "safetensors")
    assert (Path(told["path"]) / "model.safetensors").stat().st_nlink == 2
    there = load(told["path"]).state["model"]
    assert all(torch.equal(there[name], tensor) for name, tensor in weights.items())
    told = import_checkpoint(tmp_path / "model.safetensors")
    assert Path(told["path"]) == tmp_path
    assert verify(tmp_path)["ok"]
    with pytest.raises(CheckpointError, match="is already a checkpoint"):
        import_checkpoint(tmp_path)


def test_an_index_says_which_files_belong_together(weights, tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    halves = {"model-00001-of-00002.safetensors": ["a.weight"], "model-00002-of-00002.safetensors": ["a.bias", "n"]}
    for file, names in halves.items():
        save_file({name: weights[name] for name in names}, folder / file)
    save_file(weights, folder / "other.safetensors")
    index = {"weight_map": {name: file for file, names in halves.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    there = imported(folder, tmp_path / "root").state["model"]
    assert all(torch.equal(there[name], tensor) for name, tensor in weights.items())
    index["weight_map"]["n"] = "../other.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=r"names '\.\./other\.safetensors'; an index may only name files in its own folder"
    ):
        import_checkpoint(folder, tmp_path / "root")


def hostile(header, data=b"\0" * 16, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is not a complete safetensors file"),
        (b"\xff" * 40, "is not a complete safetensors file"),
        (hostile({"t": TENSOR}, length=1 << 60), "is not a complete safetensors file"),
        (hostile(b"{]"), "has a header that is not valid"),
        (hostile(b"[" * 100_000), "has a header that is not valid"),
        (hostile({"t": TENSOR | {"dtype": "X"}}), "dtype X"),
        (hostile({"t": TENSOR | {"data_offsets": [0, 80]}}), "2 float32 in 80 bytes"),
        (hostile({"t": TENSOR | {"shape": [-2]}}), "has a header that is not valid"),
        (hostile({"t": TENSOR | {"data_offsets": [-8, 0]}}), "has a header that is not valid"),
        (hostile({"t": TENSOR | {"data_offsets": [16, 24]}}), "is cut off"),
        (hostile({"t": TENSOR, "u": TENSOR}), "overlap in file"),
        (hostile({"t": TENSOR}, b"\0" * 4), "is cut off"),
    ],
)
def test_a_safetensors_file_that_lies_is_refused_and_leaves_nothing(data, said, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=said):
        import_checkpoint(tmp_path / "x.safetensors", tmp_path / "root")
    assert not list((tmp_path / "root").glob("*step-*"))


class Evil:
    def __init__(self, what):
        self.what = what

    def __reduce__(self):
        return self.what


def test_what_a_pickle_would_run_is_named_and_never_run(tmp_path):
    canary = tmp_path / "ran"
    made = {
        "posix.system": Evil((os.system, (f"touch {canary}",))),
        "__builtin__.eval": Evil((eval, (f"open({str(canary)!r}, 'w')",))),
        "__builtin__.getattr": Evil((getattr, ("os", "system"))),
    }
    for what, value in made.items():
        torch.save({"w": torch.ones(2), "x": {"deep": [value]}}, tmp_path / "file.pt")
        with pytest.raises(CheckpointError, match=f"file.pt/x/deep/0 is a {what}"):
            import_checkpoint(tmp_path / "file.pt", tmp_path / "root")
        kept = imported(tmp_path / "file.pt", tmp_path / "root", drop=True)
        assert kept.state["x"] == {"deep": [None]}
    assert not canary.exists()


def test_reading_a_pickle_imports_nothing_it_names():
    data = pickle.dumps({"x": 1}).replace(b".", b"") + b"."
    assert pickle_symbols.read(data, "x") == {"x": 1}
    hostile = b"cantigravity\nfly\n(tR."
    found = pickle_symbols.read(hostile, "x")
    assert type(found).what == "antigravity.fly"
    import sys

    assert "antigravity" not in sys.modules
    for broken in (b"", b"\x80\x05", b"garbage", b"\x82\x01.", pickle.dumps([1] * 100)[:-5]):
        with pytest.raises(CheckpointError, match="is not a pickle that can be read as data"):
            pickle_symbols.read(broken, "x")


def connects(cut_off):
    """Whether a process that called `cut_off` reaches a listener of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pid = os.fork()
        if pid == 0:
            try:
                cut = cut_off()
                socket.create_connection(listener.getsockname(), timeout=LIMIT_S).close()
            except OSError as e:
                os._exit(1 if cut and e.errno in (errno.ENETUNREACH, errno.EACCES, errno.ECONNREFUSED) else 2)
            os._exit(0 if not cut else 3)
        return {0: True, 1: False}[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]


def test_a_reader_has_no_network_neither_by_namespace_nor_by_filter():
    assert connects(sandbox.without_privileges) is True
    assert connects(sandbox.isolate) is False
    if platform.machine() in sandbox._SYSTEMS:
        assert connects(lambda: sandbox._without_sockets(sandbox._libc())) is False


def test_views_strides_and_ties_of_torch_files_come_back(tmp_path):
    base = torch.arange(60.0)
    state = {"base": base, "part": base[4:10], "every": base[::3], "turned": base.view(6, 10).t(), "again": base}
    state["apart"] = torch.randn(40, 30).t()[3:9, 1:20:2]
    torch.save(state, tmp_path / "file.pt")
    there = imported(tmp_path / "file.pt", tmp_path / "root").state["model"]
    assert all(torch.equal(there[name], tensor) for name, tensor in state.items())
    assert there["again"] is there["base"]
    there["base"][4] = -1
    assert (there["part"][0], there["turned"][4, 0]) == (-1, -1)


def test_lightning_checkpoints_have_a_model_a_step_and_the_rest(tmp_path):
    model = nn.Linear(2, 2)
    held = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save(
        {"state_dict": held, "global_step": 42, "epoch": 3, "optimizer_states": [{"state": {}}], "loops": {}},
        tmp_path / "last.ckpt",
    )
    live = nn.Linear(2, 2)
    loaded = load(import_checkpoint(tmp_path / "last.ckpt", tmp_path / "root")["path"], {"model": live})
    assert loaded.step == 42
    assert torch.equal(live.weight, model.weight)
    assert loaded.state["extra"] == {"global_step": 42, "epoch": 3}
    assert loaded.state["optimizer_states"] == [{"state": {}}]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[: len(data) // 2], "is damaged"),
        (lambda data: b"\x80\x02" + data, "is not a file of torch.save"),
        (lambda data: data.replace(struct.pack("<f", 1.25), struct.pack("<f", 1.5)), "does not match its CRC-32"),
    ],
)
def test_a_torch_file_that_is_not_what_was_saved_is_refused(damage, said, tmp_path):
    torch.save({"w": torch.full((9,), 1.25)}, tmp_path / "file.pt")
    (tmp_path / "file.pt").write_bytes(damage((tmp_path / "file.pt").read_bytes()))
    with pytest.raises(CheckpointError, match=said):
        import_checkpoint(tmp_path / "file.pt", tmp_path / "root")
    assert not list((tmp_path / "root").glob("*step-*"))


def forged(path, pickled, storage=b"\0" * 8):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/data/0", storage)


def tensor_pickle(offset, shape, stride, count=2):
    class Persistent(pickle.Pickler):
        def persistent_id(self, value):
            return ("storage", torch.FloatStorage, "0", "cpu", count) if value == "here" else None

    out = io.BytesIO()
    rebuilt = Evil((torch._utils._rebuild_tensor_v2, ("here", offset, shape, stride, False, {})))
    Persistent(out, 2).dump({"w": rebuilt})
    return out.getvalue()


@pytest.mark.parametrize(
    ("pickled", "said"),
    [
        (tensor_pickle(0, (9,), (1,)), "declares elements beyond its storage of 8 bytes"),
        (tensor_pickle(1, (2,), (1,)), "declares elements beyond its storage"),
        (tensor_pickle(-1, (1,), (1,)), "cannot be imported"),
        (tensor_pickle(0, (1 << 50,), (0,)), "would take 4294967296 MiB and are made of 0.00 MiB .*at most 16 times"),
        (tensor_pickle(0, (2,), (1,), 5), "storage 0 has 8 bytes, its pickle declares 5 float32"),
    ],
)
def test_a_forged_tensor_is_refused(pickled, said, tmp_path):
    forged(tmp_path / "file.pt", pickled)
    with pytest.raises(CheckpointError, match=said):
        import_checkpoint(tmp_path / "file.pt", tmp_path / "root")


def test_dcp_folders_come_in_with_what_ranks_cut_and_what_is_no_tensor(tmp_path):
    state = {"model": {"w": torch.randn(4, 6)}, "extra": {"epoch": 3, "list": [torch.ones(2), 5]}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    told = import_checkpoint(tmp_path / "dcp", tmp_path / "root")
    there = load(told["path"]).state
    assert told["format"] == "dcp"
    assert torch.equal(there["model"]["w"], state["model"]["w"])
    assert there["extra"]["epoch"] == 3
    assert there["extra"]["list"][1] == 5
    (tmp_path / "dcp" / ".metadata").write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match="is not a pickle"):
        import_checkpoint(tmp_path / "dcp", tmp_path / "root")


def test_every_tensor_of_a_dcp_folder_has_its_own_place(tmp_path):
    """Each lies in a pickle of its own: one that was read and forgotten must not stand for the next."""
    state = {"model": {f"w{i}": torch.full((3,), float(i)) for i in range(400)}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    found = read(tmp_path / "dcp", "dcp", drop=False)
    assert len({reference.storage.key for reference in found.references.values()}) == 400


@pytest.fixture
def own(tied, train, tmp_path):
    model = tied()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 2)
    state = {"model": model, "optimizer": optimizer, "rng": True, "extra": {"epoch": 1, "pair": (1, 2)}}
    return save(tmp_path / "own", 9, state).path, model, optimizer


def test_what_is_exported_is_read_by_those_it_is_for(own, tmp_path):
    path, model, optimizer = own
    told = export_checkpoint(path, tmp_path / "hf")
    assert told["notes"] == ["model/head.weight is tied to model/embedding.weight and not written twice",
                             "left out: extra, optimizer, rng"]  # fmt: skip
    plain = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(plain["embedding.weight"], model.embedding.weight)
    export_checkpoint(path, tmp_path / "all.pt", format="torch")
    read = torch.load(tmp_path / "all.pt", weights_only=False)
    assert torch.equal(read["model"]["head.weight"], model.head.weight)
    fresh = torch.optim.AdamW(model.parameters())
    fresh.load_state_dict(read["optimizer"])
    assert torch.equal(fresh.state[model.middle.bias]["exp_avg"], optimizer.state[model.middle.bias]["exp_avg"])
    export_checkpoint(path, tmp_path / "dcp", format="dcp")
    blank = {"model": {"middle.weight": torch.zeros(8, 8)}}
    dcp.load(blank, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(blank["model"]["middle.weight"], model.middle.weight)
    export_checkpoint(path, tmp_path / "acc", format="accelerate")
    names = {p.name for p in (tmp_path / "acc").iterdir()}
    assert names == {"model.safetensors", "optimizer.bin", "random_states_0.pkl"}
    assert torch.load(tmp_path / "acc" / "random_states_0.pkl", weights_only=False)["step"] == 9
    for folder in ("hf", "all.pt", "dcp", "acc"):
        there = imported(tmp_path / folder, tmp_path / f"back {folder}").state["model"]
        assert torch.equal(there["middle.weight"], model.middle.weight), folder


def test_a_large_module_is_cut_into_files_with_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr("workers.checkpoint.exchange.exporter.SHARD_BYTES", 4000)
    model = nn.Sequential(*(nn.Linear(25, 25) for _ in range(4)))
    path = save(tmp_path / "own", 1, {"model": model}).path
    told = export_checkpoint(path, tmp_path / "hf")
    assert told["files"][0] == "model-00001-of-00004.safetensors"
    there = imported(tmp_path / "hf", tmp_path / "back").state["model"]
    assert all(torch.equal(there[name], tensor) for name, tensor in model.state_dict().items())


def test_what_cannot_be_done_is_said_with_the_remedy(own, tmp_path):
    path = own[0]
    (tmp_path / "there").mkdir()
    (tmp_path / "odd.bin").write_bytes(b"something")
    (tmp_path / "notes.txt").write_bytes(b"something")
    two = save(tmp_path / "two", 1, {"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}).path
    for call, kind, said in [
        (lambda: export_checkpoint(path, tmp_path / "there"), CheckpointError, "already exists"),
        (
            lambda: export_checkpoint(path, tmp_path / "x", format="gguf"),
            UserError,
            "format is 'gguf'; valid: safetens",
        ),
        (lambda: export_checkpoint(two, tmp_path / "x"), CheckpointError, "has 2 modules; choose one of a, b"),
        (lambda: export_checkpoint(two, tmp_path / "x", entry="c"), CheckpointError, "has no module 'c'"),
        (lambda: import_checkpoint(tmp_path / "none", tmp_path / "x"), NotFound, "there is nothing at"),
        (lambda: import_checkpoint(tmp_path / "there", tmp_path / "x"), CheckpointError, "has nothing that can be"),
        (lambda: import_checkpoint(tmp_path / "notes.txt", tmp_path / "x"), CheckpointError, "has an unknown format"),
        (
            lambda: import_checkpoint(tmp_path / "odd.bin", tmp_path / "x"),
            CheckpointError,
            "is not a file of torch.save",
        ),
        (lambda: import_checkpoint(tmp_path / "odd.bin"), UserError, "cannot be imported in place"),
    ]:
        with pytest.raises(kind, match=said):
            call()
    assert not (tmp_path / "x").exists() or not list((tmp_path / "x").iterdir())


def test_an_imported_file_is_looked_into_like_any_other(weights, tmp_path):
    save_file(weights, tmp_path / "model.safetensors")
    told = import_checkpoint(tmp_path / "model.safetensors", tmp_path / "root")
    with open_checkpoint(told["path"]) as opened:
        assert torch.equal(opened.tensor("model/a.weight", slice(3, 9)), weights["a.weight"][3:9])
        assert torch.equal(opened.tensor("model/a.bias"), weights["a.bias"])


def test_files_that_are_read_together_keep_their_own_tensors(tmp_path):
    """What one file's pickle made is freed before the next is read: its place in memory must stand for nothing."""
    plain = PickleDecoder()
    for i in range(30):
        path = tmp_path / f"{i}.pkl"
        torch.save({j: {"step": torch.ones(2), "average": torch.ones(3, i + 1)} for j in range(i % 5 + 1)}, path)
        archive = Archive(path)
        plain.allow(str(path), archive.pickle_bytes)
        found = plain.value(archive.value, path.name)
        del archive
        assert {tensor.storage.file for slots in found.values() for tensor in slots.values()} == {str(path)}

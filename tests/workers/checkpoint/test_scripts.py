"""Checkpoints of scripts: which are whole, what the next attempt is given, tensors of devices that it has not got."""

import json
import os
import pickle
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from lazy_modules import LazyModule
from safetensors.torch import save_file

from workers.checkpoint.exchange.change_stamps import stamp
from workers.checkpoint.exchange.completeness import check
from workers.checkpoint.exchange.device_remap import loads_on, replace_devices, to_cpu
from workers.checkpoint.exchange.pickles.pickle_size_estimate import Unsound
from workers.checkpoint.exchange.script_versions import hand_on, keep
from workers.checkpoint.tools import run_in_child
from workers.errors import CheckpointError

dcp = LazyModule("torch.distributed.checkpoint")
CPU = ("cpu", 1)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def saved(path: Path, **more) -> Path:
    """What scripts save: 4 tensors of a model with a tied one, and an optimizer's 3 for each of its 3 parameters."""
    model = torch.nn.Sequential(torch.nn.Embedding(20, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 20, bias=False))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95))
    model(torch.arange(20)).square().mean().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}, path)
    return path


def tagged(path: Path, device: str, **more) -> Path:
    """As torch.save writes it on a machine with that device: the names of devices are all that differs."""
    saved(path, **more)
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    name = next(name for name in entries if name.endswith("data.pkl"))
    told = device.encode()
    entries[name] = entries[name].replace(b"X\3\0\0\0cpu", b"X" + len(told).to_bytes(4, "little") + told)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return path


def cut(path: Path, share: float = 0.6) -> Path:
    """What a process that was killed while it wrote has left."""
    os.truncate(path, int(path.stat().st_size * share))
    return path


@pytest.fixture
def output(tmp_path):
    folder = tmp_path / "output-2"
    folder.mkdir()
    return folder


# -- what is whole


def test_a_file_of_torch_that_was_cut_off_anywhere_is_torn_and_the_whole_one_is_not(tmp_path):
    path = saved(tmp_path / "ckpt.pt")
    assert check(path) == ("whole", "torch", "")
    data = path.read_bytes()
    for size in (0, 1, 4, 100, len(data) // 2, len(data) - 30, len(data) - 1):
        path.write_bytes(data[:size])
        assert check(path).state == "torn", size


def test_one_flipped_bit_is_seen(tmp_path):
    path = saved(tmp_path / "ckpt.pt")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert check(path).state == "torn" and "CRC" in check(path).why


def test_a_safetensors_file_that_is_shorter_than_its_header_says_is_torn(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(100), "b": torch.ones(3)}, path)
    assert check(path) == ("whole", "safetensors", "")
    assert check(cut(path, 0.9)).why.startswith("it has ") and "its header says" in check(path).why
    assert check(cut(path, 0.01)).state == "torn"


def test_a_folder_of_dcp_is_torn_while_its_data_are_newer_than_its_metadata(tmp_path):
    folder, state = tmp_path / "dcp", {"model": torch.nn.Linear(4, 2).state_dict()}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    assert check(folder) == ("whole", "dcp", "")
    [data] = folder.glob("*.distcp")
    os.utime(data, ns=(0, (folder / ".metadata").stat().st_mtime_ns + 1))
    assert check(folder) == ("torn", "dcp", f"{data.name} is newer than .metadata, which is written after it")
    (folder / ".metadata").unlink()
    assert check(folder).why == "it has no .metadata, which is written last"


def test_a_folder_of_accelerate_is_torn_until_its_random_states_are_written(tmp_path):
    folder = tmp_path / "state"
    folder.mkdir()
    save_file({"a": torch.ones(100)}, folder / "model.safetensors")
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.bin")
    assert check(folder) == ("torn", "accelerate", "it has no random_states_0.pkl, which is written last")
    torch.save({"step": 1}, folder / "random_states_0.pkl")
    assert check(folder) == ("whole", "accelerate", "")
    save_file({"a": torch.zeros(100)}, folder / "model.safetensors")
    later = (folder / "random_states_0.pkl").stat().st_mtime_ns + 1
    os.utime(folder / "model.safetensors", ns=(later, later))
    assert check(folder).why == "model.safetensors is newer than random_states_0.pkl, which is written after it"


def trainer_folder(folder: Path, step: int = 1, *, parts: int = 9) -> Path:
    """A folder as the Trainer saves it, or its first `parts` files."""
    folder.mkdir(parents=True)
    files = {
        "config.json": lambda path: path.write_text("{}"),
        "model.safetensors": lambda path: save_file({"a": torch.full((100,), float(step))}, path),
        "training_args.bin": lambda path: torch.save({"lr": 0.1}, path),
        "optimizer.pt": lambda path: torch.save({"state": {}, "param_groups": []}, path),
        "scheduler.pt": lambda path: torch.save({"last_epoch": step}, path),
        "rng_state.pth": lambda path: torch.save({"cpu": torch.get_rng_state()}, path),
        "trainer_state.json": lambda path: path.write_text(json.dumps({"global_step": step})),
    }
    for second, (name, write) in enumerate([*files.items()][:parts]):
        write(folder / name)
        os.utime(folder / name, (step * 100 + second, step * 100 + second))
    return folder


@pytest.mark.parametrize("format", ["auto", "trainer"])
def test_a_folder_of_the_trainer_is_torn_until_its_state_is_written(tmp_path, format):  # noqa: A002
    assert check(trainer_folder(tmp_path / "checkpoint-1"), format) == ("whole", "trainer", "")
    for parts in range(3, 7):  # from its arguments on it is known for the Trainer's
        folder = trainer_folder(tmp_path / f"{parts}" / "checkpoint-2", 2, parts=parts)
        assert check(folder, format) == ("torn", "trainer", "it has no trainer_state.json, which is written last")
    for newer in ("model.safetensors", "optimizer.pt", "scheduler.pt"):
        folder = trainer_folder(tmp_path / newer / "checkpoint-3", 3)
        os.utime(folder / newer, (400, 400))
        why = f"{newer} is newer than trainer_state.json, which is written after it"
        assert check(folder, format) == ("torn", "trainer", why)
    os.utime(cut(tmp_path / "checkpoint-1" / "optimizer.pt"), (100, 100))
    assert check(tmp_path / "checkpoint-1", format).why.startswith("optimizer.pt: it was not written completely")


def test_what_fsdp_shards_is_as_old_as_the_folder_it_lies_in(tmp_path):
    folder = trainer_folder(tmp_path / "checkpoint-1")
    dcp.save({"model": {"a": torch.ones(3)}}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    assert check(folder).why.endswith("is newer than trainer_state.json, which is written after it")
    os.utime(folder / "trainer_state.json")
    assert check(folder) == ("whole", "trainer", "")


@pytest.mark.parametrize("format", ["auto", "trainer"])
def test_of_the_trainer_s_output_folder_the_newest_save_counts(output, format):  # noqa: A002
    for step in (9, 100):
        trainer_folder(output / "run" / f"checkpoint-{step}", step)
    (output / "run" / "checkpoint-9" / "trainer_state.json").unlink()  # it is being removed
    assert check(output / "run", format) == ("whole", "trainer", "")
    assert keep(str(output), "run", format) == {"kept": True, "why": ""}
    trainer_folder(output / "run" / "checkpoint-200", 200, parts=4)
    why = "checkpoint-200: it has no trainer_state.json, which is written last"
    assert keep(str(output), "run", format) == {"kept": False, "why": why}
    told = hand_on(str(output), "run", format, *CPU)
    assert told["found"] and f"run was half written ({why})" in told["text"]
    assert {path.name for path in (output / "run").iterdir()} == {"checkpoint-9", "checkpoint-100"}


def test_saves_whose_numbers_cannot_be_compared_are_unread(tmp_path):
    trainer_folder(tmp_path / "epoch_1")
    trainer_folder(tmp_path / "step_7")
    trainer_folder(tmp_path / "tmp-checkpoint-9")
    assert check(tmp_path) == ("unread", "", "its format is unknown")


def test_what_nobody_can_tell_is_unread_and_never_unpickled(tmp_path):
    class Harm:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "harmed",))

    path = tmp_path / "state.pkl"
    path.write_bytes(pickle.dumps(Harm()))
    assert check(path) == ("unread", "", "its format is unknown")
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert check(tmp_path / "old.pt").state == "unread"
    torch.save({"a": Harm()}, tmp_path / "harm.pt")
    assert check(tmp_path / "harm.pt").state == "whole"
    assert to_cpu(tmp_path / "harm.pt", loads_on(*CPU)) == {}
    (tmp_path / "link.pt").symlink_to("harm.pt")
    assert check(tmp_path / "link.pt").state == "unread"
    assert check(tmp_path / "none.pt").state == "absent"
    assert not (tmp_path / "harmed").exists()


def test_the_format_that_its_user_names_is_believed(tmp_path):
    assert check(saved(tmp_path / "state"), "torch").state == "whole"
    assert check(tmp_path / "state", "dcp").why == "dcp writes folders, and it is a file"
    (tmp_path / "folder").mkdir()
    assert check(tmp_path / "folder").state == "absent"
    shutil.copy(tmp_path / "state", tmp_path / "folder")
    assert check(tmp_path / "folder").state == "unread"
    assert check(tmp_path / "folder", "torch").why == "torch.save writes files, and it is a folder"


# -- devices


@pytest.mark.parametrize("device", ["cuda:0", "cuda:3", "xpu:0", "mps", "hpu"])
def test_tensors_of_a_device_that_is_not_here_load_on_the_cpu_and_all_else_stays(tmp_path, device):
    config = {"device": "cuda", "name": "tiny", "betas": (0.9, 0.95)}
    path = tagged(tmp_path / "ckpt.pt", device, config=config)
    size, at = path.stat().st_size, path.stat().st_mtime_ns
    with pytest.raises((RuntimeError, AttributeError, ModuleNotFoundError, ImportError)):
        torch.load(path, weights_only=True)
    wanted = torch.load(path, map_location="cpu", weights_only=True)
    assert check(path).state == "whole"
    moved = to_cpu(path, loads_on(*CPU))
    assert moved == {device: 4 + 9}
    assert (path.stat().st_size, path.stat().st_mtime_ns, check(path)) == (size, at, ("whole", "torch", ""))
    for options in ({"weights_only": True}, {"weights_only": False}, {"weights_only": True, "mmap": True}):
        found = torch.load(path, **options)
        assert str(found) == str(wanted) and found["config"] == config
    assert to_cpu(path, loads_on(*CPU)) == {}


def test_devices_that_the_next_node_has_stay_as_they_are(tmp_path):
    path = tagged(tmp_path / "ckpt.pt", "cuda:1")
    before = path.read_bytes()
    assert to_cpu(path, loads_on("cuda", 2)) == {} and path.read_bytes() == before
    assert set(to_cpu(path, loads_on("cuda", 1))) == {"cuda:1"}


def test_a_text_that_is_also_something_else_is_left_alone(tmp_path):
    storage = b"(X\7\0\0\0storageq\1ctorch\nFloatStorage\nX\1\0\0\0" + b"0X\6\0\0\0cuda:0q\2K\4tQ"
    alone = b"\x80\2}q\0(X\1\0\0\0a" + storage + b"u."
    moved = replace_devices(alone, loads_on(*CPU))
    assert moved[1] == {"cuda:0": 1} and len(moved[0]) == len(alone) and b"cuda" not in moved[0]
    also = b"\x80\2}q\0(X\1\0\0\0a" + storage + b"X\6\0\0\0deviceh\2u."
    with pytest.raises(Unsound, match="uses 'cuda:0' for purposes other than devices of tensors"):
        replace_devices(also, loads_on(*CPU))


def test_what_is_no_name_of_a_device_is_left_alone(output):
    tagged(output / "ckpt.pt", "cuda\x1b[31m")
    told = hand_on(str(output), "ckpt.pt", "auto", *CPU)
    assert told["found"] and "puts a tensor on 'cuda\\x1b[31m', which is not a device" in told["text"]


def test_xla_s_tensors_load_where_torch_knows_no_xla(tmp_path):
    python = os.environ.get("POLYFLEET_XLA_PYTHON")
    if not python:
        pytest.skip("POLYFLEET_XLA_PYTHON names no Python with torch-xla")
    path = tmp_path / "xla.pt"
    script = (
        "import sys, torch, torch_xla\n"
        "layer = torch.nn.Linear(3, 2).to('xla'); optimizer = torch.optim.AdamW(layer.parameters())\n"
        "layer(torch.ones(1, 3, device='xla')).sum().backward(); optimizer.step()\n"
        "torch.save({'model': layer.state_dict(), 'optimizer': optimizer.state_dict()}, sys.argv[1])\n"
    )
    subprocess.run([python, "-c", script, path], check=True, env=os.environ | {"PJRT_DEVICE": "CPU"})
    with pytest.raises(NotImplementedError, match="XLA"):
        torch.load(path)
    wanted = torch.load(path, map_location="cpu")
    assert to_cpu(path, loads_on("xla", 1)) == {}
    assert to_cpu(path, loads_on(*CPU)) == {"xla:0": 6}
    for weights_only in (True, False):
        assert str(torch.load(path, weights_only=weights_only)) == str(wanted)


# -- the last whole version


def test_a_save_that_was_cut_off_is_put_aside_and_the_last_whole_version_takes_its_place(output):
    path = saved(output / "ckpt.pt", step=1)
    whole = path.read_bytes()
    assert keep(str(output), "ckpt.pt", "auto") == {"kept": True, "why": ""}
    assert keep(str(output), "ckpt.pt", "auto")["why"] == "this version was copied before"
    saved(path, step=2)
    cut(path)
    assert keep(str(output), "ckpt.pt", "auto")["why"].startswith("it was not written completely")
    told = hand_on(str(output), "ckpt.pt", "auto", *CPU)
    assert told["found"] and path.read_bytes() == whole
    assert "ckpt.pt was half written" in told["text"] and "restored its last complete version" in told["text"]
    assert check(output / "ckpt.pt.torn").state == "torn"
    assert hand_on(str(output), "ckpt.pt", "auto", *CPU) == {"found": True, "text": "ckpt.pt (torch) is complete"}


def test_without_a_whole_version_there_is_nothing_to_resume_from(output):
    assert hand_on(str(output), "ckpt.pt", "auto", *CPU)["text"].startswith("ckpt.pt does not exist")
    cut(saved(output / "ckpt.pt"))
    told = hand_on(str(output), "ckpt.pt", "auto", *CPU)
    assert not told["found"] and "was moved to ckpt.pt.torn; there is no complete version" in told["text"]
    assert not (output / "ckpt.pt").exists() and (output / "ckpt.pt.torn").exists()


def test_what_is_whole_is_kept_before_the_next_attempt_can_write_over_it(output):
    (output / "run").mkdir()
    saved(output / "run" / "ckpt.pt")
    assert hand_on(str(output), "run/ckpt.pt", "torch", *CPU)["found"]
    cut(output / "run" / "ckpt.pt")
    assert "restored its last complete" in hand_on(str(output), "run/ckpt.pt", "torch", *CPU)["text"]
    (output / "run" / "ckpt.pt").unlink()
    told = hand_on(str(output), "run/ckpt.pt", "torch", *CPU)
    assert told["found"] and told["text"].startswith("run/ckpt.pt was missing; restored its last complete version, of ")
    assert len(list((output / ".polyfleet").iterdir())) == 1


def test_a_copy_that_was_cut_off_or_changed_meanwhile_does_not_count(output):
    saved(output / "ckpt.pt", step=1)
    keep(str(output), "ckpt.pt", "auto")
    (output / ".polyfleet" / "part").mkdir()
    (output / ".polyfleet" / "part" / "ckpt.pt").write_bytes(b"PK")
    saved(output / "ckpt.pt", step=2)
    cut(output / "ckpt.pt")
    assert "restored its last complete" in hand_on(str(output), "ckpt.pt", "auto", *CPU)["text"]
    assert torch.load(output / "ckpt.pt")["step"] == 1


def test_a_folder_goes_back_to_its_last_whole_version_as_one(output):
    dcp.save({"a": torch.ones(4)}, checkpoint_id=output / "dcp", no_dist=True)
    before = stamp(output / "dcp")
    assert keep(str(output), "dcp", "auto")["kept"]
    [data] = (output / "dcp").glob("*.distcp")
    data.write_bytes(b"half of another save")
    told = hand_on(str(output), "dcp", "auto", *CPU)
    assert told["found"] and stamp(output / "dcp") == before and (output / "dcp.torn").is_dir()
    state = {"a": torch.zeros(4)}
    dcp.load(state, checkpoint_id=output / "dcp", no_dist=True)
    assert state["a"].sum() == 4


def test_what_is_handed_on_is_told_with_numbers_also_by_the_process_with_limits(output):
    tagged(output / "ckpt.pt", "cuda:0")
    given = {"folder": str(output), "path": "ckpt.pt", "format": "auto"}
    assert run_in_child("keep", given)["kept"]
    told = run_in_child("hand_on", {**given, "device": "cpu", "count": 1})
    assert told == {"found": True, "text": "ckpt.pt (torch) is complete; its 13 tensors of cuda:0 are on the CPU now"}
    assert torch.load(output / "ckpt.pt")["model"]["2.weight"].device.type == "cpu"
    cut(output / "ckpt.pt")
    run_in_child("hand_on", {**given, "device": "cuda", "count": 1})
    assert torch.load(output / "ckpt.pt")["model"]["2.weight"].device.type == "cpu"


def test_a_path_that_leads_through_a_link_is_refused(output):
    (output / "away").symlink_to("/tmp")
    with pytest.raises(CheckpointError, match="away is a link"):
        hand_on(str(output), "away/ckpt.pt", "auto", *CPU)

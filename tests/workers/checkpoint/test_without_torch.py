"""What the server and the agents use: it answers without torch, which takes seconds to import."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import workers.checkpoint
from cluster.errors import UserError
from workers.checkpoint import describe, list_checkpoints, plan, save, verify
from workers.checkpoint.conversion.target_dtypes import notes

TORCH_FREE = """
import json, sys
from workers.checkpoint import describe, latest, list_checkpoints, plan, verify
import workers.checkpoint.disk.inspect, workers.checkpoint.format.manifest
root = sys.argv[1]
path = latest(root).path
print(json.dumps([describe(path), verify(path), list_checkpoints(root), plan(path, "tpu")]) and "answered")
print([name for name in ("torch", "ray", "safetensors") if name in sys.modules])
"""


@pytest.fixture
def saved(tied: Callable[..., nn.Module], tmp_path: Path) -> Path:
    model = tied()
    extra = {"wide": torch.zeros(2, dtype=torch.float64), "wave": torch.zeros(3, dtype=torch.complex64), "loss": 0.5}
    extra |= {"small": torch.zeros(4, dtype=torch.float8_e4m3fnuz), "table": np.zeros(5)}
    state: dict[str, Any] = {"model": model, "extra": extra, "rng": True}
    return save(tmp_path / "job", 1200, state, attempt="mnist-1a2b3c.2", kind="cpu").path


def test_looking_at_checkpoints_imports_no_torch(saved):
    done = subprocess.run([sys.executable, "-c", TORCH_FREE, saved.parent], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("answered\n[]\n", "")


def test_all_public_names_exist_and_no_module_hides_one():
    for name in workers.checkpoint.__all__:
        assert callable(getattr(workers.checkpoint, name))
    with pytest.raises(AttributeError, match="no attribute 'sav'"):
        workers.checkpoint.sav  # noqa: B018


def test_a_summary_says_who_saved_it_and_what_is_in_it(saved):
    summary = describe(saved)
    created = summary.pop("created")
    assert created.endswith("Z")
    assert summary == {
        "path": str(saved),
        "name": saved.name,
        "step": 1200,
        "producer": {
            "polyfleet": "0.1.0",
            "torch": torch.__version__,
            "backend": "cpu",
            "kind": "cpu",
            "job": "mnist-1a2b3c",
            "epoch": 2,
        },
        "bytes": (saved / "shard-00001.safetensors").stat().st_size,
        "files": 1,
        "world": 1,
        "pinned": False,
        "damaged": "",
        "entries": {
            "model": {"kind": "module", "type": "Tied"},
            "extra": {"kind": "tree", "type": ""},
            "rng": {"kind": "rng", "type": ""},
        },
        "tensors": 15,
        "parameters": 20 * 8 + 8 * 8 + 8 + 8 + 8,
        "dtypes": {
            "complex64": {"tensors": 1, "bytes": 24},
            "float32": {"tensors": 7, "bytes": 4 * (20 * 8 + 8 * 8 + 5 * 8)},
            "float64": {"tensors": 2, "bytes": 16 + 40},
            "float8_e4m3fnuz": {"tensors": 1, "bytes": 4},
            "int64": {"tensors": 1, "bytes": 8},
            "uint32": {"tensors": 2, "bytes": 2 * 4 * 625 - 4},
            "uint8": {"tensors": 1, "bytes": torch.get_rng_state().numel()},
        },
        "roles": {"parameter": 5, "buffer": 3, "tensor": 3, "array": 1, "rng": 3},
        "ties": {"model/head.weight": "model/embedding.weight"},
    }


def test_all_checkpoints_below_a_folder_are_listed_and_damaged_ones_say_so(saved, tmp_path):
    save(tmp_path / "job", 1300, {"extra": 1})
    broken = save(tmp_path / "other", 7, {"extra": 1}).path
    (broken / "MANIFEST.json").write_text("{}")
    (tmp_path / "other" / "step-00000009-00000000").mkdir()
    listed = list_checkpoints(tmp_path)
    assert [(line["name"].rpartition("-")[0], line["problem"]) for line in listed] == [
        ("step-00001300", ""),
        ("step-00001200", ""),
        ("step-00000007", f"{broken / 'MANIFEST.json'} is not a polyfleet-checkpoint manifest"),
    ]
    assert (listed[2]["bytes"], listed[2]["producer"]["kind"], listed[2]["created"]) == (0, "", "")
    assert list_checkpoints(tmp_path / "nowhere") == []


def test_a_folder_of_checkpoints_stands_for_its_newest_sound_or_not(saved):
    newest = saved.parent / f"step-{int(saved.name.split('-')[1]) + 1:08d}-00000000"
    assert verify(saved.parent)["path"] == str(saved)
    newest.mkdir()
    (newest / "MANIFEST.json").write_text("{}")
    checked = verify(saved.parent)
    assert (checked["path"], checked["ok"]) == (str(newest), False)


def actions(path: Path, kind: str) -> dict[str, str]:
    return {line["dtype"]: f"{line['action']} {line['to']}" for line in plan(path, kind)["dtypes"]}


def test_a_plan_says_what_each_target_keeps_converts_and_refuses(saved):
    kept = {name: f"keep {name}" for name in ("complex64", "float32", "float64", "float8_e4m3fnuz", "int64")}
    assert actions(saved, "nvidia") == actions(saved, "amd") == kept
    assert actions(saved, "cpu") == kept | {"float8_e4m3fnuz": "convert bfloat16"}  # held, but not computed with
    assert actions(saved, "xla:emulated") == kept | {"float8_e4m3fnuz": "convert bfloat16"}
    assert actions(saved, "tpu") == kept | {
        "complex64": "refuse complex64",
        "float64": "convert float32",
        "float8_e4m3fnuz": "convert bfloat16",
    }
    assert actions(saved, "mps") == kept | {"float64": "convert float32", "float8_e4m3fnuz": "convert bfloat16"}


def test_a_plan_gives_its_reasons_and_what_cannot_follow(saved):
    planned = plan(saved, "tpu")
    lines = {line["dtype"]: line for line in planned["dtypes"]}
    assert (planned["ok"], planned["step"], planned["source"]) == (
        False,
        1200,
        {"backend": "cpu", "kind": "cpu", "world": 1},
    )
    assert lines["float64"]["reason"] == "a TPU has no float64 (XLA on the CPU keeps it)"
    assert (lines["float64"]["tensors"], lines["float64"]["bytes"]) == (1, 16)  # the array stays with numpy
    assert (lines["float64"]["may_lose"], lines["float8_e4m3fnuz"]["may_lose"]) == (True, False)
    assert lines["complex64"]["example"] == "extra/wave"
    assert planned["random"] == {
        "python": "continued",
        "numpy": "continued",
        "cpu": "continued",
        "xla": "derived: saved on cpu, no stream of xla to continue",
    }
    assert (
        "nvidia computes in float8_e4m3fn"
        in {d["dtype"]: d for d in plan(saved, "cuda")["dtypes"]}["float8_e4m3fnuz"]["reason"]
    )
    with pytest.raises(UserError, match=r"unknown kind 'tpuu'; did you mean 'tpu'\?"):
        plan(saved, "tpuu")


def test_fp8_of_another_flavour_is_noted_by_the_models_own():
    said = "amd:MI300X computes in float8_e4m3fnuz, where the same bits mean half the value; they stay float8_e4m3fn"
    assert notes("amd:MI300X")["float8_e4m3fn"] == said
    assert "float8_e4m3fn" not in notes("amd:MI355X")
    assert "computes in float8_e4m3fn, where the same bits mean twice" in notes("amd:MI355X")["float8_e4m3fnuz"]
    assert notes("amd") == {}  # some have the one, some the other


def test_a_plan_for_a_kind_that_nobody_lists_is_refused_with_the_nearest(saved):
    with pytest.raises(UserError, match=r"unknown kind 'tpu:v99'; did you mean 'tpu:v\d'"):
        plan(saved, "tpu:v99")
    with pytest.raises(UserError, match="no back end computes on intel:Gaudi3"):
        plan(saved, "intel:Gaudi3")
    assert plan(saved, "A100-80GB")["target"]["kind"] == "nvidia:A100-80GB"

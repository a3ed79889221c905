"""The examples about back ends do what their first lines say, on every back end this process can use."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from workers.devices import backends

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def as_a_script(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path))
    yield
    for name in ("cross_platform_training", "backend_comparison", "inference_pipeline"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", backends.available())
def test_the_training_loop_learns_on_every_back_end(name):
    """Each in its own process: torch-xla cannot train where another device did so before it was opened."""
    script = EXAMPLES / "cross_platform_training.py"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, script, name], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    told = re.search(r"loss ([\d.]+) after 200 steps", done.stdout)
    assert told, done.stdout
    assert float(told[1]) < 0.2


def test_the_comparison_finds_the_same_answer_on_all_back_ends():
    import backend_comparison as example

    found = example.compare()
    assert found.keys() == set(backends.available())
    assert all(seconds > 0 and difference < 1e-3 for seconds, difference in found.values())


def test_the_inference_pipeline_classifies_as_the_model_it_was_given():
    import inference_pipeline as example

    torch.manual_seed(3)
    found = example.classify("O1", batches=2)
    assert len(found) == 16
    assert all(isinstance(label, int) and 0 <= label < 10 and math.isfinite(label) for label in found)

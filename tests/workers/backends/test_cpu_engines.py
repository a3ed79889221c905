"""IPEX as the engine of the CPU back end; test_other_environment.py runs it where IPEX is installed."""

import copy
import os

import pytest
import torch
from torch import nn

from workers import backends

pytestmark = pytest.mark.skipif(os.environ.get("POLYFLEET_CPU_ENGINE") != "ipex", reason="IPEX is not the engine here")


def test_the_engine_is_part_of_what_the_backend_says_it_is():
    assert backends.create("cpu").get_device_info().properties["engine"] == "ipex"


@pytest.mark.parametrize(("precision", "tolerance"), [("", 1e-5), ("bf16", 3e-2)])
def test_the_highest_level_uses_ipex_operators_on_a_copy(precision, tolerance):
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), torch.rand(8, 16)
    before = copy.deepcopy(model.state_dict())
    prepared = backends.create("cpu").prepare(model, "O2", x, precision)
    assert "compile: IPEX operators" in prepared.applied
    with torch.no_grad():
        have = prepared.model(x)
        assert have.dtype == torch.float32
        torch.testing.assert_close(have, model(x), rtol=tolerance, atol=tolerance)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_training_is_left_to_torch_and_the_reason_is_given():
    trained = backends.create("cpu").prepare_training(nn.Linear(2, 2), level="O2")
    assert "checkpoints cannot carry" in trained.skipped["compile"]

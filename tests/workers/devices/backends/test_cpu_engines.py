"""IPEX as the engine of the CPU back end; test_other_environment.py runs it where IPEX is installed."""

import copy
import os

import pytest
import torch
from torch import nn

from workers.devices import backends

pytestmark = pytest.mark.skipif(os.environ.get("POLYFLEET_CPU_ENGINE") != "ipex", reason="IPEX is not the engine here")


def test_the_engine_is_part_of_what_the_backend_says_it_is():
    assert backends.create("cpu").get_device_info().properties["engine"] == "ipex"


@pytest.mark.parametrize(("precision", "tolerance"), [("", 1e-5), ("bf16", 3e-2)])
def test_the_highest_level_uses_ipex_operators_on_a_copy(precision, tolerance, needs_native):
    needs_native(precision or "float32")
    backend = backends.create("cpu")
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval(), torch.rand(8, 16)
    before = copy.deepcopy(model.state_dict())
    prepared = backend.prepare(model, "O2", x, precision)
    assert "compile: IPEX operators" in prepared.applied
    with torch.no_grad():
        have = prepared.model(x)
        assert have.dtype == torch.float32
        torch.testing.assert_close(have, model(x), rtol=tolerance, atol=tolerance)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_training_is_left_to_torch_and_the_reason_is_given():
    trained = backends.create("cpu").prepare_training(nn.Linear(2, 2), level="O2")
    assert "checkpoints cannot store" in trained.skipped["compile"]


def test_state_dict_keys_stay_the_users_under_ipex():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    prepared = backends.create("cpu").prepare_model(model, "O2", torch.rand(8, 16))
    assert list(prepared.state_dict()) == list(model.state_dict())
    for name, value in prepared.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name])


def test_packed_weights_follow_the_models_own_and_gradients_reach_them():
    """A model whose calls are computed elsewhere must not go on with the weights it had when it was prepared."""
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval(), torch.rand(8, 16)
    prepared = backends.create("cpu").prepare_model(model, "O2", x)
    other = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    prepared.load_state_dict(other.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(prepared(x), other(x), rtol=1e-5, atol=1e-5)
    prepared(x).sum().backward()
    assert prepared[0].weight.grad is not None


def test_a_precision_that_ipex_refuses_is_a_reason_and_no_traceback(monkeypatch):
    """As on a CPU without AVX-512, where its weights_prepack raises an AssertionError: here the model makes it fail."""

    def refuse(*_, **__):
        raise AssertionError("BF16 weight prepack needs the cpu support avx512bw")

    monkeypatch.setattr("intel_extension_for_pytorch.optimize", refuse)
    prepared = backends.create("cpu").prepare(nn.Linear(4, 4).eval(), "O2", torch.rand(1, 4))
    assert prepared.skipped["compile"] == "IPEX failed: BF16 weight prepack needs the cpu support avx512bw"

"""Fewer bits for linear layers, where torchao is."""

import copy
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from workers.devices import backends
from workers.measurement.inputs import as_sample
from workers.models.optimizers import passes
from workers.models.optimizers.trial import model_bytes
from workers.models.passes.pass_context import PassContext

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not in this environment")


def test_int8_weights_take_a_quarter_of_the_bytes_and_stay_close():
    torch.manual_seed(2)
    model, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64)).eval(), torch.rand(8, 256)
    work = PassContext(backends.create("cpu"), torch.float32, False, as_sample(x))
    (int8,) = [p for p in passes.PASSES if p.name == "int8_weights"]
    done = passes.apply(copy.deepcopy(model), [int8], work)
    assert done.applied[1].startswith("int8_weights: output changed by")
    assert model_bytes(done.model) < 0.3 * model_bytes(model)
    with torch.no_grad():
        torch.testing.assert_close(done.model(x), model(x), rtol=0.05, atol=0.02)


def test_float8_is_for_devices_that_have_it_and_configurations_that_allow_it():
    (fp8,) = [p for p in passes.PASSES if p.name == "fp8_linear"]
    work = PassContext(backends.create("cpu"), torch.float32, False, as_sample(torch.rand(2, 4)))
    skipped = passes.apply(nn.Linear(4, 4), [fp8], work).skipped
    assert skipped["fp8_linear"] == "not allowed by the option cpu.fp8"

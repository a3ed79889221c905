"""Preparing a model calls it; a cache, and the place in it, are afterwards as they were before."""

import pytest
import torch
from torch import nn

from workers.devices import backends
from workers.devices.backends.vendors.cpu import CPUBackend
from workers.measurement.inputs import as_sample
from workers.measurement.model_state import preserve_state
from workers.models.optimizers.trial import outcome
from workers.models.passes.compilers import compile_with
from workers.models.passes.pass_context import PassContext, outputs


class Generating(nn.Module):
    """Writes each call's input into a cache, counts calls, and makes a table at its first."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(8, 4))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.calls, self.last, self.table = 0, torch.zeros(1, 4), None

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(4.0)
        y = self.layer(x + self.table + self.last)
        self.cache[self.place] = y.detach()[0]
        self.place += 1
        self.calls, self.last = self.calls + 1, y.detach()
        return y + self.cache.sum() + self.calls


def state(model):
    return model.cache.clone(), int(model.place), model.calls, model.last.clone()


def assert_same(have, want):
    assert have[1:3] == want[1:3] and torch.equal(have[0], want[0]) and torch.equal(have[3], want[3])


def work(training=False):
    return PassContext(CPUBackend(), torch.float32, training, as_sample(torch.rand(1, 4)))


CALLS = {
    "outputs are compared": lambda m: outputs(m, work().sample),
    "a pass is tried": lambda m: outcome(m, work()),
    "a pass is tried for training": lambda m: outcome(m, work(training=True)),
    "it is compiled": lambda m: compile_with(m, work(), "eager"),
}


@pytest.mark.parametrize("what", CALLS)
def test_what_a_preparation_calls_has_its_state_as_before(what):
    model = Generating().eval()
    model(torch.rand(1, 4))
    before = state(model)
    CALLS[what](model)
    assert_same(state(model), before)
    with torch.no_grad():
        model(torch.rand(1, 4))
    assert model.calls == before[2] + 1


def test_a_table_that_the_first_call_makes_is_not_made_again():
    model = Generating().eval()
    with preserve_state(model):
        model(torch.rand(1, 4))
    table = model.table
    model(torch.rand(1, 4))
    assert model.table is table and model.calls == 1


def test_state_is_restored_where_the_call_fails():
    model = Generating().eval()
    with pytest.raises(RuntimeError), preserve_state(model):
        model(torch.rand(1, 4))
        model(torch.rand(1, 5))
    assert_same(state(model), state(Generating()))


def test_a_prepared_model_begins_where_the_given_one_was():
    model = Generating().eval()
    with backends.create("cpu") as backend:
        prepared = backend.prepare_model(model, "O1", sample_input=torch.rand(1, 4))
    assert_same(state(prepared), state(model))


def test_lazy_modules_keep_what_their_first_call_initializes():
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d()).eval()
    with preserve_state(model):
        model(torch.rand(2, 3))
    assert (model[0].in_features, model[1].num_features, model(torch.rand(2, 3)).shape) == (3, 8, (2, 8))

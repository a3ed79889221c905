"""Training as people write it, word for word: what they hand over first, and what they build before and after.

Runs over every back end of this process; test_other_environment.py runs it beside torch-xla and IPEX too.
"""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cluster.errors import UserError
from workers.checkpoint import load, save
from workers.devices import backends
from workers.tasks.context import Context

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor imports what torch deprecates
NAMES = [pytest.param(n, marks=[pytest.mark.gpu] if n == "nvidia" else []) for n in backends.available()]
STEPS = 20


@pytest.fixture(scope="module", autouse=True)
def every_device_is_open():
    """torch-xla 2.8 has no backward where torch ran one before XLA was opened: see docs/backends/tpu.md."""
    for name in backends.available():
        backends.create(name)


@pytest.fixture(params=NAMES)
def backend(request):
    with backends.create(request.param) as created:
        yield created


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.drop = nn.Dropout(0.1)
        self.fc2 = nn.Linear(16, 1)

    def forward(self, x):
        return self.fc2(self.drop(torch.relu(self.fc1(x))))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def data(backend, step=0):
    x = torch.rand(32, 8, generator=torch.Generator().manual_seed(step))
    return backend.to_device(x), backend.to_device(x.sum(1, keepdim=True))


def moved(model, before):
    after = model.state_dict()
    return {name for name, value in before.items() if not torch.equal(value, after[name].detach().cpu())}


def weights(model):
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def trained(backend, model, optimizer, scheduler=None, steps=STEPS):
    """The plain loop; the losses."""
    losses = []
    for step in range(steps):
        x, y = data(backend, step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_an_optimizer_built_before_prepare_model_trains_the_prepared_model(backend, level):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    prepared = backend.prepare_model(model, level)
    prepared, optimizer = backend.optimize_for_training(prepared, optimizer)
    before = weights(prepared)
    losses = trained(backend, prepared, optimizer)
    assert moved(prepared, before) == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}
    assert losses[-1] < 0.5 * losses[0]
    assert prepared.training


def test_an_optimizer_built_after_prepare_model_trains_it_too(backend):
    torch.manual_seed(0)
    model = backend.prepare_model(Net(), "O1")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    before = weights(model)
    losses = trained(backend, model, optimizer)
    assert moved(model, before) == set(before)
    assert losses[-1] < 0.5 * losses[0]


def test_a_scheduler_that_holds_the_optimizer_still_sets_its_learning_rate(backend):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    prepared = backend.prepare_model(model)
    prepared, optimizer = backend.optimize_for_training(prepared, optimizer)
    trained(backend, prepared, optimizer, scheduler, steps=3)
    assert scheduler.optimizer is optimizer
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)


def test_gradient_clipping_and_autocast_of_the_users_own(backend):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = backend.optimize_for_training(model, optimizer)
    before = weights(model)
    lower = "bfloat16" if backend.supports_dtype("bfloat16") else "float32"
    for step in range(5):
        x, y = data(backend, step)
        optimizer.zero_grad()
        with backend.autocast(lower):
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    assert norm > 0
    assert moved(model, before) == set(before)


def test_tied_weights_and_several_parameter_groups(backend):
    torch.manual_seed(0)
    model = Tied()
    extra = nn.Linear(11, 11)
    both = nn.Sequential(model, extra)
    groups = [{"params": model.parameters(), "lr": 0.5}, {"params": extra.parameters(), "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    prepared = backend.prepare_model(both)
    prepared, optimizer = backend.optimize_for_training(prepared, optimizer)
    tokens = backend.to_device(torch.arange(11))
    before = weights(prepared)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(prepared(tokens), tokens).backward()
        optimizer.step()
    assert prepared[0].head.weight is prepared[0].embedding.weight
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.01]
    assert len(optimizer.param_groups[0]["params"]) == 1
    assert moved(prepared, before) == set(before)


def test_a_model_the_user_compiled_is_trained_through_its_wrapper(backend):
    torch.manual_seed(0)
    model = torch.compile(Net(), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    prepared, optimizer = backend.optimize_for_training(model, optimizer, level="O2")
    assert type(prepared) is type(model)
    assert "already compiled" in backend.report.skipped["compile"]
    before = weights(prepared)
    losses = trained(backend, prepared, optimizer)
    assert moved(prepared, before) == set(before)
    assert losses[-1] < losses[0]


def test_the_callers_own_model_keeps_its_weights_and_its_mode(backend):
    model = Net().eval()
    kept = weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    prepared, optimizer = backend.optimize_for_training(backend.prepare_model(model), optimizer)
    trained(backend, prepared, optimizer, steps=2)
    assert not moved(model, kept)
    assert not model.training
    assert not prepared.training


def test_an_optimizer_of_another_model_is_refused_on_every_device(backend):
    model, other = Net(), Net()
    strange = torch.optim.SGD(other.parameters(), lr=0.1)
    where = {p.device for p in model.parameters()}
    for give in (
        lambda: backend.optimize_for_training(model, strange),
        lambda: backend.optimize_for_training(backend.prepare_model(model), strange),
        lambda: backend.prepare_training(model, strange, inplace=True),
        lambda: Context(backend).prepare(model, strange),
    ):
        with pytest.raises(UserError, match="none of the 4 tensors that the optimizer holds is a parameter"):
            give()
    assert {p.device for p in model.parameters()} == where
    assert strange.param_groups[0]["params"][0] is other.fc1.weight


def test_an_optimizer_whose_parameters_were_folded_away_is_refused(backend):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared = backend.prepare_model(model, "O1", torch.rand(1, 1, 4, 4))
    assert "fold_conv_bn: 1 pair" in backend.report.applied
    with pytest.raises(UserError, match="holds"):
        backend.optimize_for_training(prepared, optimizer)


def test_a_copy_of_a_copy_is_still_known_after_the_one_between_is_gone(backend):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    prepared = backend.prepare_model(backend.prepare_model(model))
    gc.collect()
    prepared, optimizer = backend.optimize_for_training(prepared, optimizer)
    before = weights(prepared)
    trained(backend, prepared, optimizer, steps=2)
    assert moved(prepared, before) == set(before)


def lowest(backend):
    return "bfloat16" if backend.supports_dtype("bfloat16") else "float32"


def test_preparing_a_prepared_model_wraps_nothing_twice(backend):
    model, x = Net().eval(), torch.rand(2, 8)
    once = backend.prepare_model(model, "O2", x, lowest(backend))
    first = backend.report
    twice = backend.prepare_model(once, sample_input=x)
    assert backend.report.applied == first.applied
    assert list(twice.state_dict()) == list(model.state_dict())
    plain = backend.prepare_model(twice, "O0", dtype="float32")
    assert backend.report.applied == ["placement"]
    with torch.no_grad():
        torch.testing.assert_close(plain(backend.to_device(x)).cpu(), model(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(twice(backend.to_device(x)).cpu(), model(x), rtol=3e-2, atol=3e-2)


def test_a_copy_of_a_prepared_model_computes_with_its_own_weights(backend):
    x = torch.rand(2, 8)
    prepared = backend.prepare_model(Net().eval(), "O2", x, lowest(backend))
    average = copy.deepcopy(prepared)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.zero_()
        assert float(average(backend.to_device(x)).abs().max().cpu()) == 0
        assert float(prepared(backend.to_device(x)).abs().max().cpu()) > 0


def test_a_checkpoint_of_the_highest_level_loads_into_a_plain_model(backend, tmp_path):
    x = torch.rand(2, 8)
    source = Net().eval()
    prepared = backend.prepare_model(source, "O2", x, lowest(backend))
    assert list(prepared.state_dict()) == list(source.state_dict())
    path = save(tmp_path, 1, {"model": prepared}).path
    target = Net()
    load(path, into={"model": target})
    for name, value in target.state_dict().items():
        torch.testing.assert_close(value, source.state_dict()[name])
    target.load_state_dict({name: value.cpu() for name, value in prepared.state_dict().items()})


def test_the_level_may_be_called_optimization_level(backend):
    backend.prepare_model(Net(), optimization_level="O0")
    assert backend.report.applied == ["placement"]
    backend.optimize_for_training(Net(), optimization_level="conservative")
    assert "autocast" in backend.report.skipped
    with pytest.raises(UserError, match="two names of one option"):
        backend.prepare_model(Net(), "O1", optimization_level="O1")

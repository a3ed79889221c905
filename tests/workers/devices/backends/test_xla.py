"""What is peculiar to lazy tensors, on XLA's CPU runtime; test_second_environment.py runs it where torch_xla is."""

import pytest
import torch
from torch import nn

from workers.devices import backends
from workers.measurement.timing import Timer
from workers.tasks.context import Context

pytestmark = pytest.mark.skipif("tpu" not in backends.available(), reason="torch-xla is not in this environment")


def test_it_is_emulated_and_says_so():
    with backends.create("xla") as backend:
        assert backend.emulated
        assert backend.get_device_info().emulated
        assert backend.collective_backend == "gloo"
        assert backend.device.type == "xla"


def test_module_to_alone_loses_the_ties_that_the_backend_keeps():
    def tied():
        model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        model[1].weight = model[0].weight
        return model

    backend = backends.create("xla")
    torchs, ours = tied().to(backend.device), backend.to_device(tied())
    assert torchs[0].weight is not torchs[1].weight
    assert ours[0].weight is ours[1].weight


def test_a_plain_loop_through_the_context_trains_and_every_step_ends_its_graph():
    import torch_xla.debug.metrics as xla_metrics

    context = Context(backends.create("xla"), seed=4)
    context.backend.seed(4)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = [(torch.ones(8, 5), torch.full((8, 1), 3.0))] * 10
    losses = []
    with context.running():
        model, optimizer, batches = context.prepare(model, optimizer, batches)
        for step, (x, y) in enumerate(batches):
            assert x.device == context.device
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)
            if step == 1:
                context.backend.synchronize()
                xla_metrics.clear_all()
        context.backend.synchronize()
        steady = xla_metrics.counter_value("UncachedCompile") or 0
    assert [loss.item() for loss in losses[::9]] == sorted((loss.item() for loss in losses[::9]), reverse=True)
    assert losses[-1].item() < 0.1 * losses[0].item()
    assert (
        steady <= 1
    )  # eight equal steps share a graph: a loop whose graph were never cut would be compiled as one long program


def test_complex128_whose_imaginary_part_would_vanish_is_not_called_supported():
    backend = backends.create("xla")
    assert not backend.supports_dtype(torch.complex128)
    assert not backend.supports_dtype(torch.float8_e4m3fnuz)
    assert backend.supports_dtype(torch.complex64)


def test_the_highest_level_says_that_the_compiler_is_inherent():
    prepared = backends.create("xla").prepare(nn.Linear(2, 2), "O2")
    assert "compile: XLA's own, inherent: each new graph is compiled when it first runs" in prepared.applied
    assert prepared.skipped["channels_last"] == "the model has no 2-d convolution"


def test_an_optimizer_built_for_another_device_loses_what_xla_cannot_do():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    with backends.create("xla") as backend:
        backend.optimize_for_training(model, optimizer, inplace=True)
        before = model.weight.detach().cpu()
        model(torch.ones(1, 2, device=backend.device)).sum().backward()
        optimizer.step()
        assert not torch.equal(model.weight.detach().cpu(), before)
    assert optimizer.param_groups[0]["fused"] is False


def test_every_timed_call_is_computed_though_nobody_reads_its_result():
    """A lazy device computes only what is still held when its step is cut off."""
    from torch_xla.debug import metrics

    def executed():
        return (metrics.metric_data("ExecuteTime") or (0,))[0]

    with backends.create("xla") as backend:
        timer, x = Timer(backend), torch.rand(64, 64, device=backend.device)
        backend.synchronize()
        before = executed()
        block = timer.block(lambda: x @ x, 4, parts=3)
        assert executed() - before == 4 * 3
        timer.single_call_s(lambda: x @ x)
        assert executed() - before == 4 * 3 + 1
    assert len(block.parts_s) == 3 and min(block.parts_s) > 0

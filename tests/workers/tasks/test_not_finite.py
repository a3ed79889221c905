"""A training whose numbers are no numbers any more, seen by its own process."""

import pytest
import torch
from torch import nn

from workers.checkpoint import load
from workers.devices import backends
from workers.errors import NonFiniteValue
from workers.protocol import rank_progress
from workers.storage.pool_checkpoints import PoolCheckpoints
from workers.storage.pool_storage import PoolStorage
from workers.tasks import rank_main
from workers.tasks.context import Context

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def training(tmp_path):
    """A context as an attempt has it, and what it saved last."""
    return lambda **given: Context(
        backends.create("cpu"),
        **({"checkpoint_root": str(tmp_path / "c"), "stop_on_nan": True, "beats_path": tmp_path / "beat"} | given),
    )


def newest_step(tmp_path):
    found = PoolCheckpoints(PoolStorage(tmp_path)).resolve("c")["path"]
    return load(tmp_path / found).step if found else None


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"loss": NAN}, "the reported loss is nan at step 7"),
        ({"loss": torch.tensor(-INF)}, "the reported loss is -inf at step 7"),
        ({"loss": 0.5, "grad_norm": NAN}, "the reported grad_norm is nan at step 7"),
        ({"loss": 0.5, "best_loss": INF, "grad_norm": INF, "note": "nan"}, ""),
    ],
)
def test_a_number_that_makes_going_on_useless_is_refused_after_it_was_reported(training, metrics, said):
    ctx = training()
    if said:
        with pytest.raises(NonFiniteValue, match=said):
            ctx.report(step=7, **metrics)
    else:
        ctx.report(step=7, **metrics)
    assert ctx.events.in_memory[-1]["step"] == 7
    training(stop_on_nan=False).report(step=7, **metrics)


def test_after_it_nothing_is_saved_however_much_the_users_code_catches(training, tmp_path):
    ctx, model = training(), nn.Linear(2, 1)
    with ctx.running():
        ctx.checkpoint.save(1, {"model": model})
    with pytest.raises(NonFiniteValue):
        ctx.report(step=2, loss=NAN)
    for again in (lambda: ctx.checkpoint.save(2, {"model": model}), lambda: ctx.preempted, lambda: ctx.report(step=3)):
        with pytest.raises(NonFiniteValue, match="the reported loss is nan at step 2"):
            again()
    assert newest_step(tmp_path) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_checkpoint_with_nan_in_a_parameter_is_never_committed(training, tmp_path, dtype):
    ctx, model = training(), nn.Linear(2, 1).to(dtype)
    model.register_buffer("mask", torch.tensor([NAN, -INF]))
    ctx.checkpoint.save(1, {"model": model})
    model.weight.data[0, 1] = NAN
    ctx.checkpoint.save(2, {"model": model})
    with pytest.raises(NonFiniteValue, match="parameter model/weight of the checkpoint contains NaN at step 2"):
        ctx.checkpoint.wait()
    with pytest.raises(NonFiniteValue, match="model/weight"):
        ctx.report(step=3, loss=0.5)
    assert newest_step(tmp_path) == 1


def test_nan_in_the_state_of_an_optimizer_is_found_too(training, tmp_path):
    ctx, model = training(), nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.state[model.bias]["exp_avg"][0] = NAN
    ctx.checkpoint.save(1, {"model": model, "optimizer": optimizer})
    with pytest.raises(NonFiniteValue, match=r"optimizer .*exp_avg.* of the checkpoint contains NaN at step 1"):
        ctx.checkpoint.wait()
    assert newest_step(tmp_path) is None


def test_infinite_and_huge_parameters_are_kept(training, tmp_path):
    ctx = training()
    ctx.checkpoint.save(1, {"x": nn.Parameter(torch.tensor([INF, -INF])), "y": nn.Parameter(torch.full((9,), 3e38))})
    ctx.checkpoint.wait()
    assert newest_step(tmp_path) == 1


def test_a_job_that_ignores_nan_keeps_it(training, tmp_path):
    ctx, model = training(stop_on_nan=False), nn.Linear(2, 1)
    model.weight.data.fill_(NAN)
    ctx.checkpoint.save(4, {"model": model}, asynchronous=False)
    assert newest_step(tmp_path) == 4


def test_its_failure_is_of_its_own_kind_and_reaches_other_processes():
    error = NonFiniteValue("the reported loss is nan", 3)
    assert rank_main.failure_record(error, 1)["kind"] == "nan"
    assert str(type(error)(*error.args)) == str(error)


def test_steps_pauses_and_saves_are_told_to_the_supervisor(training, tmp_path):
    ctx, model, seen = training(), nn.Linear(2, 1), []
    beat = lambda: rank_progress.read(tmp_path / "beat")  # noqa: E731
    _, loader = ctx.prepare(model, loader=[torch.ones(1, 2)] * 3)
    assert len(list(loader)) == 3
    assert (beat().steps, beat().paused) == (3, False)
    with ctx.pause("evaluation"):
        assert beat().paused
    ctx.report(step=5)
    tell = ctx.checkpoint._report_saved
    ctx.checkpoint._report_saved = lambda saved: (seen.append(beat().saving), tell(saved))
    ctx.checkpoint.save(1, {"model": model})
    ctx.checkpoint.wait()
    assert seen == [False]  # told after it is committed
    assert (beat().step, beat().flags) == (5, 0)

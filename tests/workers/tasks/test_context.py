import json
import os
import signal
from dataclasses import asdict

import pytest
import torch
from torch import nn

from cluster.errors import UserError
from workers.devices import backends
from workers.protocol.messages import Order
from workers.tasks.context import Context


def context(**given):
    return Context(backends.create("cpu"), **given)


ORDER = Order(
    job="digits-1",
    epoch=4,
    task="train",
    backend="cpu",
    kind="cpu",
    emulated=False,
    devices=(0,),
    node_rank=0,
    nodes=1,
    first_rank=0,
    ranks=1,
    world_size=1,
    master_address="",
    master_port=0,
    entry="train.py",
    arguments={"steps": 9},
    resume_from="/old",
    precision="bf16",
    batch_size=16,
    seed=3,
)


def test_an_order_becomes_what_the_users_function_sees(tmp_path, monkeypatch):
    monkeypatch.delenv("POLYFLEET_RESUME_FROM", raising=False)
    before, threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    try:
        ctx = Context.from_attempt(tmp_path, 0, json.loads(json.dumps(asdict(ORDER))))
        first = torch.rand(1)
        torch.manual_seed(3)
        assert torch.equal(first, torch.rand(1))
        assert (ctx.device, ctx.rank, ctx.local_rank, ctx.world_size) == (torch.device("cpu"), 0, 0, 1)
        assert ctx.global_batch_size == 16 * ctx.world_size
        assert (ctx.arguments, ctx.precision, ctx.batch_size, ctx.seed, ctx.resumed) == (
            {"steps": 9},
            "bf16",
            16,
            3,
            True,
        )
        assert not ctx.preempted
        os.kill(os.getpid(), signal.SIGTERM)
        assert ctx.preempted
        ctx.report(step=1, loss=torch.tensor(0.5))
    finally:
        signal.signal(signal.SIGTERM, before)
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    event = json.loads(line)
    assert {k: v for k, v in event.items() if k != "t"} == {
        "rank": 0,
        "type": "report",
        "step": 1,
        "loss": 0.5,
    }
    assert torch.get_num_threads() == threads


def test_a_report_is_remembered_as_the_last_one():
    ctx = context()
    ctx.report(step=1, loss=2.0)
    ctx.report(2, loss=torch.tensor([1.0]), accuracy=0.5)
    assert ctx.last_step == 2
    assert ctx.last_report == {"step": 2, "loss": 1.0, "accuracy": 0.5}
    assert [event["step"] for event in ctx.events.in_memory] == [1, 2]


def test_a_metric_may_not_be_called_like_what_every_event_has():
    with pytest.raises(UserError, match="the metric name 'rank' is reserved"):
        context().report(1, rank=3, loss=0.5)


def test_a_report_may_tell_how_many_steps_the_whole_run_has():
    ctx = context()
    ctx.report(3, of=10, loss=2.0)
    ctx.report(step=10, of=torch.tensor(10))
    ctx.report(11)
    told = [{k: v for k, v in e.items() if k in ("step", "of", "loss")} for e in ctx.events.in_memory]
    assert told == [{"step": 3, "of": 10, "loss": 2.0}, {"step": 10, "of": 10}, {"step": 11}]


@pytest.mark.parametrize("of", [2, 0, -1, 2**60, 5.0, float("nan"), True, "ten", torch.tensor([5, 6])])
def test_a_number_of_steps_that_cannot_be_is_refused(of):
    ctx = context()
    with pytest.raises(UserError, match=r"of=.* at step 3; `of` is the total number of steps, from 3 to"):
        ctx.report(3, of=of, loss=0.5)
    assert ctx.events.in_memory == []


def test_prepare_returns_as_many_things_as_it_was_given():
    ctx = context()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    assert ctx.prepare(model) is model
    assert ctx.prepare(model, optimizer) == (model, optimizer)
    prepared = ctx.prepare(model, optimizer, [torch.ones(1)])
    assert prepared[:2] == (model, optimizer)
    assert [batch.item() for batch in prepared[2]] == [1.0]
    alone, loader = ctx.prepare(model, loader=[torch.ones(1)])
    assert alone is model
    assert len(loader) == 1


def test_prepare_names_the_type_of_what_is_no_module():
    with pytest.raises(UserError, match=r"ctx\.prepare received a list"):
        context().prepare([1])


def test_the_precision_of_the_job_is_applied_to_a_prepared_model(needs_native):
    needs_native("bfloat16")
    ctx = context(precision="bf16")
    seen = []

    class Watched(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            seen.append(out.dtype)
            return out

    assert ctx.prepare(Watched(2, 2))(torch.ones(1, 2)).dtype == torch.float32
    assert seen == [torch.bfloat16]
    with ctx.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_an_unknown_precision_is_refused_at_once():
    with pytest.raises(UserError, match="'bf8' is not a precision to compute in; did you mean"):
        context(precision="bf8")

import copy

import pytest
import torch
from torch import nn

from workers.checkpoint import load, save
from workers.errors import CheckpointError

pytestmark = [  # torch 2.8 warns about what its own optimizers and schedulers do
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar"),
    pytest.mark.filterwarnings("ignore:The epoch parameter in"),
]

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "Adam, foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "Adam, fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "Adam, lr a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "NAdam": torch.optim.NAdam,
    "ASGD": torch.optim.ASGD,
    "Adafactor": torch.optim.Adafactor,
    "Rprop": torch.optim.Rprop,
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_next_steps_after_a_resume_are_identical(make, tied, train, tmp_path, bits):
    model = tied()
    optimizer = make(model.parameters())
    train(model, optimizer, 3)
    save(tmp_path, 3, {"model": model, "optimizer": optimizer, "rng": True})
    expected = train(model, optimizer, 3)

    resumed = tied()
    resumed_optimizer = make(resumed.parameters())
    load(tmp_path, {"model": resumed, "optimizer": resumed_optimizer, "rng": True})
    assert train(resumed, resumed_optimizer, 3) == expected
    assert bits(resumed.state_dict()) == bits(model.state_dict())


def test_lbfgs_with_its_lists_of_directions_resumes_identically(tmp_path):
    def run(model: nn.ParameterList, optimizer: torch.optim.Optimizer) -> float:
        def closure():
            optimizer.zero_grad()
            loss = ((model[0] - torch.arange(4.0)) ** 4).sum()
            loss.backward()
            return loss

        return optimizer.step(closure).item()

    model, resumed = (nn.ParameterList([torch.ones(4)]) for _ in range(2))
    optimizer, other = (torch.optim.LBFGS(m.parameters(), max_iter=2) for m in (model, resumed))
    run(model, optimizer)
    save(tmp_path, 1, {"model": model, "optimizer": optimizer})
    load(tmp_path, {"model": resumed, "optimizer": other})
    assert [run(model, optimizer) for _ in range(3)] == [run(resumed, other) for _ in range(3)]


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [3]
        ),
    ],
    ids=["multi-step", "one cycle", "plateau", "sequential"],
)
def test_schedulers_go_on_where_they_were(make, tied, tmp_path):
    rates = []
    model, resumed = tied(), tied()
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, resumed))
    scheduler = make(optimizer)
    for _ in range(2):
        step(optimizer, scheduler)
    save(tmp_path, 2, {"model": model, "optimizer": optimizer, "scheduler": scheduler})
    other_scheduler = make(other)
    load(tmp_path, {"model": resumed, "optimizer": other, "scheduler": other_scheduler})
    for o, s in ((optimizer, scheduler), (other, other_scheduler)):
        rates.append([step(o, s) for _ in range(5)])
    assert rates[0] == rates[1]


def step(optimizer, scheduler) -> float:
    optimizer.step()
    scheduler.step(*([1.0] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
    return optimizer.param_groups[0]["lr"]


def test_state_goes_by_name_into_another_order_and_grouping(tied, train, tmp_path):
    model = tied()
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named.items() if "weight" in n], "weight_decay": 0.1},
            {"params": [p for n, p in named.items() if "bias" in n], "weight_decay": 0.0},
        ]
    )
    train(model, optimizer, 2)
    save(tmp_path, 2, {"model": model, "optimizer": optimizer})

    live = tied()
    live_named = dict(reversed(list(live.named_parameters())))
    reordered = torch.optim.AdamW(
        [
            {"params": [p for n, p in live_named.items() if "bias" in n]},
            {"params": [p for n, p in live_named.items() if "weight" in n]},
        ]
    )
    load(tmp_path, {"model": live, "optimizer": reordered})
    assert [g["weight_decay"] for g in reordered.param_groups] == [0.0, 0.1]
    for name, parameter in live_named.items():
        assert torch.equal(reordered.state[parameter]["exp_avg"], optimizer.state[named[name]]["exp_avg"])

    with pytest.raises(CheckpointError, match="different options"):
        load(tmp_path, {"model": live, "optimizer": torch.optim.AdamW(live.parameters())})


def test_an_optimizer_of_other_parameters_is_an_error_on_save_and_on_load(tied, train, tmp_path, image):
    model = tied()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    replaced = copy.deepcopy(model)  # as .to(xla) does: new parameters, the optimizer keeps the old
    with pytest.raises(CheckpointError, match=r"5 of 5 parameters.*shape \[20, 8\].*steps train nothing"):
        save(tmp_path, 1, {"model": replaced, "optimizer": optimizer})
    with pytest.raises(CheckpointError, match="not those of the saved modules"):
        save(tmp_path, 1, {"optimizer": optimizer})
    train(model, optimizer, 1)
    save(tmp_path, 1, {"model": model, "optimizer": optimizer})
    before = image(replaced)
    with pytest.raises(CheckpointError, match="steps train nothing"):
        load(tmp_path, {"model": replaced, "optimizer": optimizer})
    assert image(replaced) == before


def test_how_a_step_is_implemented_is_the_live_optimizers_business(tied, train, tmp_path):
    model = tied()
    fused = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    train(model, fused, 1)
    save(tmp_path, 1, {"model": model, "optimizer": fused})
    live = tied()
    plain = torch.optim.AdamW(live.parameters(), foreach=False)
    load(tmp_path, {"model": live, "optimizer": plain})
    group = plain.param_groups[0]
    assert (group["fused"], group["foreach"], group["lr"]) == (None, False, 0.5)
    train(live, plain, 1)


def test_a_slot_follows_its_converted_parameter_and_keeps_any_other_dtype(tmp_path, train, tied):
    model = tied().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    master = torch.randn(8, 8)
    optimizer.state[model.middle.weight]["master"] = master
    save(tmp_path, 1, {"model": model, "optimizer": optimizer})

    live = tied().to(torch.bfloat16)
    same = torch.optim.AdamW(live.parameters())
    load(tmp_path, {"model": live, "optimizer": same})
    slots = same.state[live.middle.weight]
    assert {name: slot.dtype for name, slot in slots.items()} == {
        "step": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16, "master": torch.float32,
    }  # fmt: skip
    assert torch.equal(slots["master"], master)

    wide = tied()
    wider = torch.optim.AdamW(wide.parameters())
    load(tmp_path, {"model": wide, "optimizer": wider})
    assert wider.state[wide.middle.weight]["exp_avg"].dtype == torch.float32
    train(wide, wider, 1)


def test_an_optimizer_of_another_class_or_other_parameters_is_refused(tied, train, tmp_path, image):
    model = tied()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    save(tmp_path, 1, {"model": model, "optimizer": optimizer})
    live = tied()
    before = image(live)
    with pytest.raises(CheckpointError, match="holds the state of a AdamW, the live object is a SGD"):
        load(tmp_path, {"model": live, "optimizer": torch.optim.SGD(live.parameters())})
    with pytest.raises(CheckpointError, match=r"and lacks 1 \(model/embedding.weight\)"):
        load(tmp_path, {"model": live, "optimizer": torch.optim.AdamW(list(live.parameters())[1:])})
    assert image(live) == before


def test_an_untied_model_and_its_optimizer_come_back_tied(tied, train, tmp_path):
    model = tied()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 2)
    save(tmp_path, 2, {"model": model, "optimizer": optimizer, "rng": True})
    expected = train(model, optimizer, 2)

    live = tied()
    live.head.weight = nn.Parameter(live.head.weight.detach().clone())  # as a move to XLA leaves it
    both = torch.optim.AdamW(live.parameters())
    load(tmp_path, {"model": live, "optimizer": both, "rng": True})
    assert len(both.param_groups[0]["params"]) == len(optimizer.param_groups[0]["params"])
    assert train(live, both, 2) == expected

"""Names past the wrappers of other libraries: any stack of them, in front and around inner modules, on either side."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from workers.checkpoint import import_checkpoint, load, save
from workers.checkpoint.format.wrappers import AmbiguousNamesError, fit
from workers.checkpoint.loading.comparer import diff
from workers.errors import CheckpointError

PLAIN = ("0.weight", "0.bias", "1.q.weight", "1.norm.running_mean", "2.weight")
HUGGING_FACE = ("model.embed.weight", "model.layers.0.q.weight", "model.layers.1.q.weight", "lm_head.weight")
WRAPPERS = (
    *("module", "_orig_mod", "model", "_forward_module", "_fsdp_wrapped_module", "_fpw_module"),
    *("_checkpoint_wrapped_module", "base_model.model"),
)
stacks = st.lists(st.sampled_from(WRAPPERS), max_size=5)
inner = st.dictionaries(st.sampled_from(("0", "1", "1.q", "model.layers", "model.layers.0")), stacks, max_size=3)


def wrapped(names, front, inside):
    """Each name -> the same with `front` before it and, for each module of `inside`, its stack around that module."""
    made = {}
    for name in names:
        words = name.split(".")
        new = list(front)
        for i, word in enumerate(words):
            new.append(word)
            if i + 1 < len(words):
                new += inside.get(".".join(words[: i + 1]), [])
        made[name] = ".".join(new)
    return made


@given(st.sampled_from((PLAIN, HUGGING_FACE)), stacks, inner)
@settings(max_examples=150, deadline=None)
def test_any_stack_of_wrappers_anywhere_is_stripped_on_either_side(names, front, inside):
    longer = wrapped(names, front, inside)
    back = {new: old for old, new in longer.items()}
    stored = fit([*back], {name: name for name in names})
    assert stored is not None and stored.names == back
    live = fit(names, {name: name for name in back})
    assert live is not None and live.names == longer
    assert bool(stored.stripped) == bool(live.stripped) == (set(names) != set(back))


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def imported(tensors, folder, **more):
    torch.save({"state_dict": tensors, **more}, folder / "file.ckpt")
    return import_checkpoint(folder / "file.ckpt", folder / "imported")["path"]


def test_the_report_says_what_was_stripped_and_the_values_arrive(tmp_path, bits):
    source, live = net(), net()
    names = wrapped(source.state_dict(), ["base_model.model", "_orig_mod"], {"0": ["_checkpoint_wrapped_module"]})
    report = load(imported({names[n]: t for n, t in source.state_dict().items()}, tmp_path), {"model": live}).report
    assert bits(live.state_dict()) == bits(source.state_dict())
    assert report.notes == [
        "entry 'model': stripped base_model.model._orig_mod. and _checkpoint_wrapped_module. from the stored names:"
        " base_model.model._orig_mod.0._checkpoint_wrapped_module.weight is 0.weight"
    ]


class Lightning(nn.Module):
    """A model whose network is an attribute of any name, as in a LightningModule."""

    def __init__(self, network, name="model"):
        super().__init__()
        self.add_module(name, network)


def test_plain_weights_go_into_a_live_model_that_is_wrapped(tmp_path, bits):
    source, live = net(), Lightning(Lightning(net(), "_forward_module"), "backbone")
    save(tmp_path, 1, {"model": source})
    report = load(tmp_path, {"model": live}).report
    assert bits(live.backbone._forward_module.state_dict()) == bits(source.state_dict())
    assert "stripped backbone._forward_module. from the live names" in report.notes[0]


def test_one_of_two_networks_may_be_compiled(tmp_path):
    gan = {f"generator._orig_mod.{n}": t for n, t in net().state_dict().items()}
    gan |= {f"discriminator.{n}": t for n, t in net().state_dict().items()}
    live = nn.ModuleDict({"generator": net(), "discriminator": net()})
    load(imported(gan, tmp_path), {"model": live})
    assert torch.equal(live.generator[0].weight, gan["generator._orig_mod.0.weight"])
    assert torch.equal(live.discriminator[2].bias, gan["discriminator.2.bias"])


def test_names_of_a_models_own_are_kept_beside_the_same_words_of_wrappers():
    names = ("module.weight", "weight", "model.module.bias")
    assert fit(names, {name: name for name in names}).stripped == ""
    stored = {f"module.{name}": name for name in names}
    assert fit([*stored], {name: name for name in names}).names == stored


def test_names_that_fit_in_two_ways_are_refused_with_both(tmp_path):
    live = {"model.weight": 1, "module.weight": 2}
    with pytest.raises(AmbiguousNamesError, match=r"^weight could be mod\w+\.weight or mod\w+\.weight$"):
        fit(("weight", "module.model.weight"), live)
    assert fit(("weight", "module.model.weight"), dict.fromkeys(live, 1)) is not None  # of a tie, either is right
    tensors = {"weight": torch.zeros(2, 2), "module.model.weight": torch.ones(2, 2)}
    both = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("model", "module")})
    before = both["model"].weight.clone()
    with pytest.raises(CheckpointError, match="match the live model more than once"):
        load(imported(tensors, tmp_path), {"model": both})
    assert torch.equal(both["model"].weight, before)


@pytest.mark.parametrize("change", ["missing", "more", "two alike"])
def test_where_one_name_does_not_fit_nothing_is_stripped(change, tmp_path):
    tensors = {f"module._orig_mod.{n}": t for n, t in net().state_dict().items()}
    if change == "missing":
        del tensors["module._orig_mod.0.bias"]
    else:
        tensors["module.head.weight" if change == "more" else "_orig_mod.module.0.bias"] = torch.zeros(4)
    with pytest.raises(CheckpointError, match="tensor names differ"):
        load(imported(tensors, tmp_path), {"model": net()})


class Counter(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.weight, self.count = nn.Parameter(torch.zeros(1)), count

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


def test_extra_state_follows_its_module_past_wrappers(tmp_path):
    save(tmp_path, 1, {"model": Lightning(nn.Sequential(Counter(5), Counter(6)))})
    live = nn.Sequential(Counter(0), Counter(0))
    load(tmp_path, {"model": live})
    assert [one.count for one in live] == [5, 6]


def test_an_optimizer_that_names_parameters_past_other_wrappers_goes_by_name(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    held = optimizer.state_dict()
    for group in held["param_groups"]:
        group["param_names"] = [f"_forward_module.model.{name}" for name in group["param_names"]]
    tensors = {f"model._orig_mod.{n}": t for n, t in model.state_dict().items()}
    live = net()
    its = torch.optim.AdamW([*live.parameters()][::-1])  # another order: only names tell
    loaded = load(imported(tensors, tmp_path, optimizer=held), {"model": live, "optimizer": its})
    assert not any("position" in note for note in loaded.report.notes)
    for name, parameter in live.named_parameters():
        expected = optimizer.state[dict(model.named_parameters())[name]]["exp_avg"]
        assert torch.equal(its.state[parameter]["exp_avg"], expected)


def test_diff_compares_a_compiled_model_with_a_plain_one_and_says_that_names_differ(tmp_path):
    model = net()
    plain = save(tmp_path / "plain", 1, {"model": model}).path
    tensors = {f"module._orig_mod.{n}": t.clone() for n, t in model.state_dict().items()}
    told = diff(imported(tensors, tmp_path), plain)
    assert (told["same"], told["equal"], told["tensors"]) == (False, 9, [])
    assert told["only_in_a"] == told["only_in_b"] == []
    assert "stripped module._orig_mod. from the first names" in told["names"][0]

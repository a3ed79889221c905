"""A model may change its inputs, buffers and attributes: each timed call gets them as the first call had them."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cluster.errors import UserError
from workers.benchmark import measurement
from workers.benchmark.repeated_call import RepeatedCall
from workers.benchmark.session import Session
from workers.devices import backends
from workers.measurement.inputs import MAX_COPIES, Inputs, Sample, as_sample

Batch = namedtuple("Batch", "images labels")


class Seen(list):
    """Of a model and all its copies."""

    def __deepcopy__(self, memo):
        return self


@dataclass
class Cache:
    keys: torch.Tensor
    length: int = 0


@pytest.fixture(autouse=True)
def short_warm_up(monkeypatch):
    monkeypatch.setattr(measurement, "MAX_WARMUP_S", 0.05)


@pytest.fixture
def backend():
    with backends.create("cpu") as made:
        yield made


class Model(nn.Module):
    """Has a weight to train; `change` gets the inputs and may do to them what it likes. `seen` has what came in."""

    def __init__(self, change):
        super().__init__()
        self.layer, self.change, self.seen = nn.Linear(4, 2), change, Seen()

    def forward(self, *args, **kwargs):
        if self.layer.weight.dtype == torch.float32:  # the reference is computed in float64
            self.seen.append(repr((args, kwargs)))
        x = self.change(*args, **kwargs)
        return self.layer(x.to(self.layer.weight.dtype))


def normalise(x):
    with torch.no_grad():
        return x.sub_(0.5).div_(0.25)


def pop_a_label(batch):
    batch.pop("labels")
    return batch["x"]


def grow(x, cache):
    cache.append(x)
    return x


def fill(x, cache):
    cache.keys = torch.cat([cache.keys, x])
    cache.length += 1
    return x


def x():
    return torch.linspace(0, 1, 12).reshape(3, 4)


KINDS = {
    "a tensor": (normalise, lambda: x(), ["input[0]"]),
    "a tensor in a dict": (lambda b: normalise(b["x"]), lambda: ({"x": x(), "y": x()},), ["input[0]['x']"]),
    "a keyword argument": (lambda *, mask, data: normalise(mask) + data, lambda: {"mask": x(), "data": x()},
                           ["input['mask']"]),
    "in a tuple in a list": (lambda v: normalise(v[1][0]), lambda: ([x(), (x(),)],), ["input[0][1][0]"]),
    "a named tuple": (lambda b: normalise(b.images), lambda: (Batch(x(), x()),), ["input[0][0]"]),
    "a dict that loses a key": (pop_a_label, lambda: ({"x": x(), "labels": x()},), ["input[0]['labels']"]),
    "a list that grows": (grow, lambda: (x(), [x()]), ["input[1][1]"]),
    "an object with a cache": (fill, lambda: (x(), Cache(x())), ["input[1].keys", "input[1].length"]),
    "a view of another input": (lambda a, b: normalise(a) + b * 0,
                                lambda: (lambda base: (base, base[:]))(x()), ["input[0]", "input[1]"]),
}  # fmt: skip


def opened(session, mode="forward"):
    cell = {"case": f"user/m/{mode}", "precision": "fp32", "level": "O1"}
    return session.handle({"do": "prepare", "measurement": "a", "case": cell})


@pytest.mark.parametrize("mode", ["forward", "train"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_call_gets_its_input_as_the_first_had_it(backend, kind, mode):
    change, make, names = KINDS[kind]
    model = Model(change)
    session = Session(backend, 0, lambda: (model, as_sample(make())))
    told = opened(session, mode)
    assert told["changed_in_place"] == names, told
    assert "in place" in told["note"] and names[0] in told["note"]
    assert told["accuracy"]["ok"] is True and told["calls_per_part"] <= MAX_COPIES
    session.handle({"do": "run", "measurement": "a"})
    first, *others = model.seen
    assert len(others) > told["calls_per_part"] and set(others) == {first}


def test_what_changes_nothing_is_called_on_one_input_without_a_copy(backend):
    model, places = Model(lambda x: places.add(x.data_ptr()) or x * 2), set()
    told = opened(Session(backend, 0, lambda: (model, as_sample(x()))))
    assert "note" not in told and "changed_in_place" not in told
    places.clear()
    session = Session(backend, 0, lambda: (model, as_sample(x())))
    opened(session)
    places.clear()
    session.handle({"do": "run", "measurement": "a"})
    assert len(places) == 1


class Counting(nn.Module):
    """A cache of fixed size with a place to write to, as generation has; it is used up after `size` calls."""

    def __init__(self, size=3, replaces=False):
        super().__init__()
        self.layer, self.replaces = nn.Linear(4, 4), replaces
        self.register_buffer("cache", torch.zeros(size, 4))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        y = self.layer(x)
        self.cache[self.place] = y[0].detach()
        if self.replaces:
            self.place = self.place + 1
        else:
            self.place += 1
        return y + self.cache.sum(0)


@pytest.mark.parametrize("replaces", [False, True], ids=["written in place", "replaced"])
def test_buffers_that_go_on_changing_are_restored_before_each_call(backend, replaces):
    session = Session(backend, 0, lambda: (Counting(replaces=replaces), as_sample(x())))
    told = opened(session)
    assert told["changed_in_place"] == ["buffer cache", "buffer place"], told
    assert (told["calls_per_part"], told["accuracy"]["ok"]) == (1, True)
    assert session.handle({"do": "run", "measurement": "a"})["calls"] == 1


class Attributes(nn.Module):
    """Keeps what it goes on changing without registering it. `begin` gets the module before its first call."""

    def __init__(self, begin, change):
        super().__init__()
        self.layer, self.change = nn.Linear(4, 4), change
        begin(self)

    def forward(self, x):
        y = self.layer(x)
        return y + self.change(self, y.detach()).to(y.dtype)


def write_at_place(module, y):
    module.cache = module.cache.to(y.dtype)
    module.cache[module.place] = y[0]
    module.place += 1
    return module.cache.sum(0)


def append(module, y):
    module.cache = y if module.cache is None else torch.cat([module.cache.to(y.dtype), y])
    return module.cache.sum(0)


def begin_once(module, y):
    if not hasattr(module, "sums"):
        module.sums = torch.zeros(4, dtype=y.dtype)
    module.sums = module.sums + y[0]
    return module.sums


def fill_list(module, y):
    module.cache = [*(module.cache or []), y[0]]
    return sum(module.cache)


CHANGING = {
    "a tensor and a number": (lambda m: vars(m).update(cache=torch.zeros(3, 4), place=0), write_at_place, "cache"),
    "written in place": (lambda m: vars(m).update(sums=torch.zeros(4)),
                         lambda m, y: m.sums.add_(y[0].to(m.sums.dtype)), "sums"),
    "None at first": (lambda m: vars(m).update(cache=None), append, "cache"),
    "made by the first call": (lambda m: None, begin_once, "sums"),
    "a list in the place of None": (lambda m: vars(m).update(cache=None), fill_list, "cache"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGING)
def test_attributes_that_go_on_changing_are_restored_like_buffers(backend, kind):
    begin, change, name = CHANGING[kind]
    outputs = set()

    class Model(Attributes):
        def forward(self, x):
            y = super().forward(x)
            if y.dtype == torch.float32:
                outputs.add(repr(y.tolist()))
            return y

    session = Session(backend, 0, lambda: (Model(begin, change), as_sample(x())))
    told = opened(session)
    assert told.get("changed_in_place") == [f"attribute {name}"], told
    assert (told["calls_per_part"], told["accuracy"]["ok"]) == (1, True)
    outputs.clear()
    session.handle({"do": "run", "measurement": "a"})
    assert len(outputs) == 1


UNRESTORED = {
    "a list": (lambda m: vars(m).update(cache=[torch.zeros(4)]), lambda m, y: m.cache.append(y[0]) or y),
    "a dict": (lambda m: vars(m).update(cache={"k": torch.zeros(4)}), lambda m, y: m.cache["k"].add_(1) + y),
    "an object": (lambda m: vars(m).update(cache=Cache(torch.zeros(1, 4))), lambda m, y: m.cache.keys.add_(1) + y),
}


@pytest.mark.parametrize("kind", UNRESTORED)
def test_what_an_attribute_holds_and_cannot_be_restored_is_refused_with_its_name(backend, kind):
    told = opened(Session(backend, 0, lambda: (Attributes(*UNRESTORED[kind]), as_sample(x()))))
    assert "each forward changes attribute cache" in told["failed"] and "buffer" in told["failed"]


UNCHANGED = {
    "the same result each time": (lambda m: None, lambda m, y: setattr(m, "last", y) or y),
    "a table that is made once": (lambda m: vars(m).update(angles=None),
                                  lambda m, y: vars(m).update(angles=torch.arange(4.0)) or m.angles),
    "a count of calls": (lambda m: vars(m).update(calls=0), lambda m, y: vars(m).update(calls=m.calls + 1) or y),
    "one that has no memory of its own": (lambda m: vars(m).update(a=torch.zeros(1).expand(4),
                                                                   b=torch.zeros(4, device="meta")), lambda m, y: y),
    "weights in a list": (lambda m: vars(m).update(all=[m.layer.weight]), lambda m, y: y),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNCHANGED)
def test_attributes_that_stay_the_same_are_left_alone(backend, kind):
    told = opened(Session(backend, 0, lambda: (Attributes(*UNCHANGED[kind]), as_sample(x()))))
    assert "note" not in told and told["accuracy"]["ok"] is True, told


class Norm(nn.Module):
    """Its statistics move in training alone. No feature is nearly constant: the norm would magnify its rounding."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        nn.init.eye_(self.layers[0].weight)

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("mode", ["forward", "train"])
def test_training_may_change_parameters_and_buffers(backend, mode):
    told = opened(Session(backend, 0, lambda: (Norm(), as_sample(x()))), mode)
    assert "note" not in told and told["accuracy"]["ok"] is True


class Lazy(nn.Module):
    """Fills in a table at the first call only."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("angles", torch.zeros(4))

    def forward(self, x):
        self.angles.copy_(torch.arange(4.0))
        return self.layer(x + self.angles)


def test_a_buffer_that_only_the_first_call_changes_is_left_as_it_then_is(backend):
    told = opened(Session(backend, 0, lambda: (Lazy(), as_sample(x()))))
    assert "note" not in told


class Drifting(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        with torch.no_grad():
            self.scale.mul_(1.5)
        return F.linear(x, self.scale[None])


def test_a_forward_that_changes_a_parameter_is_refused_with_its_name(backend):
    told = opened(Session(backend, 0, lambda: (Drifting(), as_sample(x()))))
    assert "each forward changes parameter scale" in told["failed"] and "register" in told["failed"]


class Late(nn.Module):
    """Changes what `name` names, from its fifth call on: no look at the first two calls can see it."""

    def __init__(self, name):
        super().__init__()
        self.layer, self.name, self.calls = nn.Linear(4, 2), name, 0
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.calls += 1
        if self.calls >= 5:
            with torch.no_grad():
                {"input[0]": x, "parameter layer.bias": self.layer.bias, "buffer mean": self.mean}[self.name].add_(1)
        return self.layer(x + self.mean)


def measured(session, mode):
    """The answer to the check after one block."""
    case = {"case": f"user/m/{mode}", "precision": "fp32", "level": "O0"}
    prepared = session.handle({"do": "prepare", "measurement": "a", "case": case})
    assert "failed" not in prepared and "failed" not in session.handle({"do": "run", "measurement": "a"})
    return session.handle({"do": "check", "measurement": "a"})


@pytest.mark.parametrize("name", ["input[0]", "parameter layer.bias", "buffer mean"])
def test_a_change_that_begins_with_a_later_call_is_found_after_the_last_block(backend, name):
    checked = measured(Session(backend, 0, lambda: (Late(name), as_sample(x()))), "forward")
    assert f"a later call changed {name}, so the timed calls" in checked["failed"]


def test_a_training_may_go_on_changing_its_buffers(backend):
    assert measured(Session(backend, 0, lambda: (Late("buffer mean"), as_sample(x()))), "train") == {}


def test_kernels_that_change_an_input_are_refused():
    repetition = RepeatedCall(lambda given: given.args[0].mul_(2), Sample((x(),), {}), to_host=torch.Tensor.cpu)
    repetition.first()
    with pytest.raises(UserError, match=r"the kernels change input\[0\] in place"):
        repetition.detect_changes(lambda call: call())


def test_copies_keep_what_tensors_share_and_are_not_more_than_fit():
    base = x()
    sample = Sample((base, base.t(), base[:0]), {"grown": (base.requires_grad_(True) * 2)}).copy()
    assert sample.args[0].data_ptr() == sample.args[1].data_ptr() != base.data_ptr()
    assert sample.args[1].stride() == (1, 4) and torch.equal(sample.kwargs["grown"], base * 2)
    assert Inputs(Sample((torch.empty(1 << 30, device="meta", dtype=torch.uint8),), {})).max_calls == 2


def test_inputs_are_copied_if_either_of_two_calls_changes_them():
    inputs = Inputs(Sample((x(), x()), {}))
    inputs.probe(lambda: inputs.next_input().args[1].add_(1), lambda: inputs.next_input().args[0].add_(1))
    assert inputs.changed == ("input[1]", "input[0]")

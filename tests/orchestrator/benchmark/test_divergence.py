"""Two fingerprints compared: what rounding explains is no difference, the first that is more is named."""

import math

import pytest
import torch
from torch import nn

from orchestrator.show.benchmark import validation
from orchestrator.submission import divergence
from workers.devices import backends
from workers.measurement.inputs import Sample
from workers.models.validation import activations


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.wrong = 0.0

    def forward(self, x):
        hidden = self.second(self.first(x)) * (1 + self.wrong)
        return {"scores": self.third(hidden), "more": (hidden, x)}


def recorded(model, steps=2, precision=""):
    torch.manual_seed(0)
    model.load_state_dict({name: torch.randn(t.shape) * 0.3 for name, t in model.state_dict().items()})
    sample = Sample((torch.rand(5, 8),), {})
    with backends.create("cpu") as backend:
        return activations.record(model, sample, backend, steps, lambda: backend.autocast(precision))


def test_every_layer_gradient_and_step_is_recorded_with_nested_outputs():
    told = recorded(Nested())
    names = [layer["name"] for layer in told["layers"]]
    assert names == ["first", "second", "third", *("the model itself" + s for s in ("", "[1]", "[2]"))]
    assert len(told["gradients"]) == 6 and len(told["losses"]) == 3
    assert told["losses"][2] < told["losses"][0]


def test_the_same_is_the_same_and_bit_for_bit_is_said():
    compared = divergence.compare(recorded(Nested()), recorded(Nested()), "float32")
    assert divergence.same(compared)
    assert {row["note"] for row in compared["layers"]} == {"bit for bit"}


def test_the_first_layer_gradient_and_step_that_part_are_named():
    off = Nested()
    off.wrong = 1e-3
    compared = divergence.compare(recorded(Nested()), recorded(off), "float32")
    assert not divergence.same(compared)
    assert compared["first"]["layer"] == "third" and compared["first"]["step"] == "step 0"
    told = {"precision": "float32", "targets": [{"target": "cpu"}], "compared": [{"target": "xla", **compared}]}
    assert "xla: differs from cpu first at layer third" in validation(told).html()
    assert divergence.same(divergence.compare(recorded(Nested()), recorded(off), "float32", rtol=0.1))


def test_lower_precision_is_within_its_own_limits_and_not_within_those_of_float32(needs_native):
    needs_native("bfloat16")
    one, other = recorded(Nested()), recorded(Nested(), precision="bf16")
    assert divergence.same(divergence.compare(one, other, "bfloat16"))
    assert not divergence.same(divergence.compare(one, other, "float32"))


@pytest.mark.parametrize("key", ["weights_sha256", "inputs_sha256"])
def test_other_weights_or_inputs_are_not_comparable(key):
    one = recorded(Nested())
    compared = divergence.compare(one, one | {key: "other"}, "float32")
    assert (compared["comparable"], key.partition("_")[0] in compared["reason"]) == (False, True)
    assert not divergence.same(compared)


def test_a_nan_on_one_side_parts():
    one = recorded(Nested())
    other = one | {"layers": [one["layers"][0] | {"not_finite": 1, "sha256": "x"}, *one["layers"][1:]]}
    assert divergence.compare(one, other, "float32")["first"]["layer"] == "first"


def test_the_distance_of_two_sketches_is_that_of_their_tensors():
    torch.manual_seed(1)
    one = torch.randn(100, 1000)
    for change in (
        torch.randn(100, 1000) * 1e-3,
        torch.zeros(100, 1000).index_put((torch.tensor(7),), torch.ones(1000)),
    ):
        sides = [activations.sketch(t.double().reshape(-1).numpy()) for t in (one, one + change)]
        assert math.dist(*sides) == pytest.approx(float(change.norm()), rel=0.3)


def test_a_single_value_that_differs_is_seen_wherever_it_is():
    torch.manual_seed(1)
    for place in (0, 1, 12_345, 99_999):
        sides = [torch.zeros(100_000), torch.zeros(100_000)]
        sides[0][0] = sides[1][0] = 1.0
        sides[1][place] += 0.25
        rows = [{"layers": [activations.fingerprint("only", t)], "gradients": [], "losses": []} for t in sides]
        compared = divergence.compare(*(r | {"weights_sha256": "", "inputs_sha256": ""} for r in rows), "float32")
        assert compared["first"]["layer"] == "only"

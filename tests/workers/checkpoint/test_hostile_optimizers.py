"""Files whose optimizer's state says what no optimizer can say: refused by name, or dropped on request."""

import json

import pytest
import torch

from workers.checkpoint import DamagedCheckpoint, import_checkpoint, load
from workers.checkpoint.exchange.sources.formats import read
from workers.checkpoint.exchange.sources.optimizer_state import NotOptimizerStateError, read_state_dict
from workers.checkpoint.format.manifest import NAME, manifest_digest
from workers.errors import CheckpointError


def sound():
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer.state_dict(), model.state_dict()


def taken_in(held, weights, tmp_path, **options):
    torch.save({"model": weights, "optimizer": held}, tmp_path / "file.pt")
    return import_checkpoint(tmp_path / "file.pt", tmp_path / "root", **options)


def changed(**options):
    def change(held):
        held["param_groups"][0].update(options)

    return change


HOSTILE = {
    "huge": (
        changed(params=[0, 10**5000]),
        "numbers a parameter .a number of 16610 bits.; numbers go from 0 to 999999",
    ),
    "negative": (changed(params=[0, -1]), "numbers a parameter -1"),
    "text": (changed(params=["0", "1"]), "has state of parameter 0, which is in none"),
    "numbers as text": (
        lambda held: (changed(params=["0", "1"])(held), held.update(state={"0": {}, "1": {}})),
        "calls its parameters 0, 1; model has no 0, 1",
    ),
    "strangers' names": (
        lambda held: (changed(params=["a", "b"])(held), held.update(state={})),
        "calls its parameters a, b; model has no a, b",
    ),
    "fractions": (changed(params=[0, 1.5]), "numbers a parameter 1.5"),
    "truth": (changed(params=[0, True]), "numbers a parameter True"),
    "twice": (changed(params=[0, 0]), "has a parameter twice"),
    "nobody's state": (lambda held: held["state"].update({7: {}}), "has state of parameter 7, which is in none"),
    "huge state": (
        lambda held: held["state"].update({10**5000: {}}),
        "has state of parameter .a number of 16610 bits.",
    ),
    "state as text": (lambda held: held["state"].update({"0": {}}), "has state of parameter '0', which is in none"),
    "a list for slots": (lambda held: held["state"].update({0: [1]}), "has state of parameter 0 that is not a dict"),
    "a number for a slot": (
        lambda held: held["state"][0].update({1: 2}),
        "has state of parameter 0 that is not a dict",
    ),
    "a tag for an option": (changed(**{"$tensor": "model/weight"}), r"has an option called '\$tensor'"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_state_that_no_optimizer_can_have_is_refused_or_dropped(what, tmp_path):
    change, said = HOSTILE[what]
    held, weights = sound()
    change(held)
    torch.save({"model": weights, "optimizer": held}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match=f"optimizer looks like the state of an optimizer, but it .*{said}"):
        read(tmp_path / "file.pt", "torch", drop=False)
    found = read(tmp_path / "file.pt", "torch", drop=True)
    assert ([*found.entries], len(found.tensors)) == (["model"], 2)
    assert found.notes[0].startswith("dropped optimizer, the state of an optimizer that ")


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([{"params": [0] * 2_000_000}], "has 1 groups with 2000000 parameters; from 1 to 1000000 are read"),
        ([{"params": []}] * 1_000_001, "has 1000001 groups with 0 parameters"),
        ([{"params": []}], "has 1 groups with 0 parameters"),
    ],
)
def test_millions_of_parameters_or_groups_are_refused_before_they_are_looked_at(groups, said):
    with pytest.raises(NotOptimizerStateError, match=said):
        read_state_dict({"state": {}, "param_groups": groups})


def test_a_refused_optimizer_leaves_no_checkpoint_and_dropped_the_weights(tmp_path):
    held, weights = sound()
    held["state"][10**5000] = {}
    with pytest.raises(
        CheckpointError, match=r"a number of 16610 bits.* pass --skip-unsupported to leave it out; the rest is imported"
    ):
        taken_in(held, weights, tmp_path)
    assert not list((tmp_path / "root").glob("*step-*"))
    told = taken_in(held, weights, tmp_path, drop=True)
    assert (told["entries"], told["tensors"]) == ({"model": "module"}, 2)


def test_a_manifest_that_lies_about_numbers_is_damage(tmp_path):
    held, weights = sound()
    path = taken_in(held, weights, tmp_path)["path"]
    whole = (tmp_path / path / NAME).read_text()
    for lie in (
        lambda tree: tree["groups"][0].update(parameters=[0, 0]),
        lambda tree: tree["groups"][0].update(parameters=[0, "model/bias"]),
        lambda tree: tree["groups"][0].update(parameters=[[0], {}]),
        lambda tree: tree["groups"][0].update(parameters=[0]),
        lambda tree: tree["state"].update({"x": {}}),
        lambda tree: tree["names"].update({"1": tree["names"]["0"]}),
    ):
        data = json.loads(whole)
        lie(data["entries"]["optimizer"]["tree"])
        (tmp_path / path / NAME).write_text(json.dumps(data | {"digest": manifest_digest(data)}))
        live = torch.nn.Linear(2, 3)
        with pytest.raises(DamagedCheckpoint, match="the optimizer's tree is malformed"):
            load(path, {"model": live, "optimizer": torch.optim.Adam(live.parameters())})

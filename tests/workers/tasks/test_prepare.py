import os
import sys

import pytest
import torch
from torch import nn

from cluster.errors import NotFound, UserError
from workers import load_prepared
from workers.checkpoint import describe, load, save
from workers.devices import backends
from workers.tasks import prepare
from workers.tasks.context import Context

NAME = "tpu" if "tpu" in backends.available() else "cpu"
SOURCE = """
import torch
from torch import nn

def make_model():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    nn.init.uniform_(model[1].running_mean)
    return model

def without_bias():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    nn.init.uniform_(model[1].running_mean)
    return model

def sample_input(batch_size):
    return torch.rand(batch_size, 1, 8, 8)

def wrong():
    return 5

class Unsteady(nn.Linear):
    def forward(self, x):
        return super().forward(x) * torch.rand(())

def changing():
    return nn.Sequential(nn.Flatten(), Unsteady(64, 2))
"""


@pytest.fixture
def context(tmp_path, monkeypatch):
    (tmp_path / "prepared_model.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(entry="prepared_model.py:make_model", name=NAME, **given):
        arguments = given.pop("arguments", {})
        root = str(tmp_path / "checkpoints")
        return Context(backends.create(name), entry=entry, arguments=arguments, checkpoint_root=root, **given)

    yield make
    sys.modules.pop("prepared_model", None)


def test_the_report_tells_what_was_done_and_how_far_the_result_is_off(context):
    report = prepare.main(context(arguments={"level": "O1"}, batch_size=3))
    assert report["level"] == "O1"
    assert "fold_conv_bn: 1 pair" in report["applied"]
    assert set(report["skipped"]) >= {"autocast"}
    assert 0 <= report["max_abs_error"] < 1e-4
    assert 0 <= report["max_rel_error"] < 1e-4
    assert report["parameters"] == 4 * 9 + 4 + 144 * 5 + 5
    assert report["bytes"] == 4 * report["parameters"]


def test_the_artefact_is_a_checkpoint_of_the_folded_model_with_its_report(context):
    report = prepare.main(context(arguments={"level": "O1"}))
    assert describe(report["artefact"])["step"] == 0
    loaded = load(report["artefact"])
    assert set(loaded.state["model"]) == {"0.weight", "0.bias", "4.weight", "4.bias"}
    assert loaded.state["extra"]["report"]["applied"] == report["applied"]
    assert loaded.state["extra"]["entry"] == "prepared_model.py:make_model"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor imports what torch deprecates
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_the_artefact_is_loaded_into_the_users_own_model(context, level):
    """Also where its batch norm was folded away, and its convolution has got a bias that the factory's has not."""
    report = prepare.main(context("prepared_model.py:without_bias", arguments={"level": level}))
    assert ("fold_conv_bn: 1 pair" in report["applied"]) == (level != "O0")
    module = sys.modules["prepared_model"]
    torch.manual_seed(0)
    want = module.without_bias().eval()
    fresh = module.without_bias()
    kept = {name: value.clone() for name, value in fresh.state_dict().items()}
    x = module.sample_input(2)
    for name in (NAME, "cpu"):
        backend = backends.create(name)
        loaded = load_prepared(report["artefact"], fresh, backend, sample_input=x)
        assert not loaded.training
        with torch.no_grad():
            have = loaded(backend.to_device(x)).cpu()
        torch.testing.assert_close(have, want(x), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(kept[name], value) for name, value in fresh.state_dict().items())


def test_another_model_or_another_checkpoint_is_refused_with_what_to_give(context, tmp_path):
    report = prepare.main(context(arguments={"level": "O1"}))
    with pytest.raises(UserError, match="pass the model that the prepare job's entry returns"):
        load_prepared(report["artefact"], nn.Linear(2, 2), "cpu")
    other = save(tmp_path / "other", 1, {"model": nn.Linear(2, 2)}).path
    with pytest.raises(UserError, match="was not made by a prepare job"):
        load_prepared(other, nn.Linear(2, 2), "cpu")


def test_a_lower_precision_is_reported_with_its_error(context, needs_native):
    needs_native("bfloat16", NAME)
    report = prepare.main(context(arguments={"level": "O1", "precision": "bf16"}))
    assert report["precision"] == "bfloat16"
    assert "autocast: bfloat16" in report["applied"]
    assert 1e-6 < report["max_rel_error"] < 5e-2


@pytest.mark.skipif(os.environ.get("POLYFLEET_CPU_ENGINE") != "ipex", reason="IPEX is not the engine here")
@pytest.mark.parametrize("precision", ["", "bf16"])
def test_what_ipex_packs_is_kept_unpacked_in_the_artefact(context, precision, needs_native):
    needs_native(precision or "float32")
    plain = prepare.main(context(name="cpu", arguments={"level": "O1"}))
    packed = prepare.main(context(name="cpu", arguments={"level": "O2", "precision": precision}))
    assert "compile: IPEX operators" in packed["applied"]
    want, have = load(plain["artefact"]).state["model"], load(packed["artefact"]).state["model"]
    assert set(have) == set(want)
    for name, tensor in want.items():
        torch.testing.assert_close(have[name].float(), tensor, rtol=1e-2 if precision else 1e-6, atol=1e-3)


def test_without_a_sample_nothing_is_claimed_about_the_error(context, tmp_path):
    (tmp_path / "prepared_model.py").write_text(SOURCE.replace("def sample_input", "def another"))
    report = prepare.main(context())
    assert report["max_abs_error"] is None
    assert "fold_conv_bn: 1 pair" in report["applied"]


def test_a_sample_factory_that_was_named_must_be_there(context):
    with pytest.raises(NotFound, match="no function 'inputs'"):
        prepare.main(context(arguments={"sample_input": "prepared_model.py:inputs"}))


def test_a_result_that_is_wrong_is_no_artefact(context, tmp_path):
    with pytest.raises(UserError, match="the prepared model is off by"):
        prepare.main(context("prepared_model.py:changing", arguments={"level": "O0"}))
    assert not (tmp_path / "checkpoints").exists()


def test_a_factory_that_returns_no_module_is_named(context):
    with pytest.raises(UserError, match=r"prepared_model\.py:wrong returned int"):
        prepare.main(context("prepared_model.py:wrong"))


def test_the_callers_torch_is_left_as_it_was(context):
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    prepare.main(context())
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == (threads, grad)

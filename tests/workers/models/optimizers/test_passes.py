import copy

import pytest
import torch
from torch import nn

from cluster.errors import UserError
from workers.devices import backends
from workers.measurement.inputs import as_sample
from workers.measurement.output_difference import difference, first_tensor
from workers.models.optimizers.passes import unwrap
from workers.models.passes import batch_norm_folding


class TwoHeads(nn.Module):
    """One convolution feeds a batch norm and something else: folding it would change the other."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)
        self.other, self.other_bn = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)

    def forward(self, x):
        y = self.conv(x)
        return self.bn(y) + self.other_bn(self.other(y)) + y


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)

    def forward(self, x):
        return self.bn(self.conv(x)) if x.sum() > 0 else x


class Viewing(nn.Module):
    """Works on contiguous tensors only, like much code there is."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x).view(x.shape[0], -1)


class Remembering(nn.Module):
    """Its forward leaves what it computes in an attribute, and counts in a buffer."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.last = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), None
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.last = self.bn(self.conv(x))
        return self.last


def cpu():
    return backends.create("cpu")


def test_looking_for_pairs_leaves_the_model_as_it_was():
    model = Remembering().eval()
    assert batch_norm_folding.foldable_pairs(model) == [("conv", "bn")]
    assert (model.last, model.calls.item()) == (None, 0)


def test_only_a_convolution_that_feeds_a_batch_norm_alone_is_folded():
    model = TwoHeads().eval()
    folded, pairs = copy.deepcopy(model), batch_norm_folding.foldable_pairs(model)
    assert pairs == [("other", "other_bn")]
    undo = batch_norm_folding.fold(folded, pairs)
    assert isinstance(folded.other_bn, nn.Identity)
    assert isinstance(folded.bn, nn.BatchNorm2d)
    x = torch.rand(2, 1, 5, 5)
    torch.testing.assert_close(folded(x), model(x))
    undo()
    assert list(folded.state_dict()) == list(model.state_dict())


def test_a_shared_convolution_is_not_folded():
    conv = nn.Conv2d(2, 2, 1)
    assert (
        batch_norm_folding.foldable_pairs(nn.Sequential(conv, nn.BatchNorm2d(2), conv, nn.BatchNorm2d(2)).eval()) == []
    )


def test_a_model_that_cannot_be_traced_says_so_and_still_runs():
    prepared = cpu().prepare(Branching().eval(), "O1", torch.ones(1, 1, 5, 5))
    assert prepared.skipped["fold_conv_bn"].startswith("the model cannot be traced: TraceError")
    assert prepared.model(torch.ones(1, 1, 5, 5)).shape == (1, 2, 3, 3)


def test_a_forward_that_fails_on_channels_last_keeps_its_layout_and_says_why():
    prepared = cpu().prepare(Viewing(), "O1", torch.rand(2, 3, 8, 8))
    assert "the model fails in this layout: view size is not compatible" in prepared.skipped["channels_last"]
    assert prepared.model.conv.weight.is_contiguous()
    assert prepared.model(torch.rand(2, 3, 8, 8)).shape == (2, 144)


def test_channels_last_is_checked_with_a_sample_and_not_tried_without():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    assert "cannot be checked without a sample" in cpu().prepare(model, "O1").skipped["channels_last"]
    prepared = cpu().prepare(model, "O1", torch.rand(2, 3, 8, 8))
    assert "channels_last" in prepared.applied
    assert prepared.model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert model[0].weight.is_contiguous()


def test_training_never_folds_and_checking_does_not_disturb_batch_statistics():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    before = copy.deepcopy(model.state_dict())
    trained = cpu().prepare_training(model, None, sample_input=torch.rand(2, 3, 8, 8))
    assert trained.skipped["fold_conv_bn"].startswith("batch norm learns during training")
    assert "channels_last" in trained.applied
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # inductor imports it
def test_the_compiler_is_part_of_the_highest_level_and_the_users_module_is_found_inside(needs_native):
    needs_native("bfloat16")
    model = nn.Linear(4, 3)
    x = torch.rand(2, 4)
    backend = cpu()
    assert backend.optimize_for_inference(model, x, "bf16") is backend.report.model
    prepared = backend.report
    assert "compile: inductor" in prepared.applied or "compile" in prepared.skipped
    torch.testing.assert_close(prepared.model(x), model(x), rtol=2e-2, atol=2e-2)
    assert isinstance(unwrap(prepared.model), nn.Linear)


def test_a_missing_compiler_is_a_reason(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    prepared = cpu().prepare(nn.Linear(4, 3), "O2")
    assert prepared.skipped["compile"] == "inductor needs a C++ compiler (g++ or clang++) on this node"


def test_a_model_that_cannot_be_copied_is_refused_with_a_remedy():
    model = nn.Linear(2, 2)
    model.cached = model(torch.ones(1, 2))
    with pytest.raises(UserError, match="cannot be copied"):
        cpu().prepare_model(model)


@pytest.mark.parametrize(
    ("value", "args", "kwargs"), [(5, (5,), {}), ((1, 2), (1, 2), {}), ([1, 2], (1, 2), {}), ({"x": 1}, (), {"x": 1})]
)
def test_a_sample_is_one_argument_several_or_named_ones(value, args, kwargs):
    assert as_sample(value) == (args, kwargs)


def test_difference_is_symmetric_in_what_is_not_a_number():
    odd, plain = torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])
    assert difference(odd, plain).max_abs == difference(plain, odd).max_abs == float("inf")
    assert difference(odd, odd).max_abs == 0
    infinite = torch.tensor([float("inf"), 2.0])
    assert difference(infinite, -infinite).max_abs == float("inf")
    assert difference(infinite, infinite).max_rel == 0
    assert difference(torch.tensor([1.5]), torch.tensor([2.0])) == (0.5, 0.25, 2.0)


def test_the_first_tensor_of_an_output_is_found_in_containers_and_asked_for_otherwise():
    assert first_tensor({"logits": [torch.ones(2)], "loss": torch.zeros(())}).tolist() == [1.0, 1.0]
    with pytest.raises(UserError, match="returned str without a tensor"):
        first_tensor("nothing")

"""Models that really have each fault; test_other_environment.py lowers them with XLA too."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from cluster.errors import UserError
from workers import estimate_memory, validate
from workers.devices import backends
from workers.models.validation.report import CHECKS

WITH_XLA = os.environ.get("PJRT_DEVICE") == "CPU"


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path))


class Masking(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), Chooser())

    def forward(self, x):
        return self.inner(x)


class Chooser(nn.Module):
    def forward(self, x):
        return x[x > 0].sum()


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Doubled(nn.Module):
    def forward(self, x):
        return (x.double() * 2).float()


class Printing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        if y.sum().item() > 1e9:
            y = y * 2
        return y


def perceptron():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def found(report, check):
    return [p for p in report.findings if p.check == check]


def test_a_plain_model_fits_and_what_was_not_looked_at_is_said():
    model = perceptron()
    before = copy.deepcopy(model.state_dict())
    report = validate(model, "nvidia:A100-80GB", torch.rand(2, 4))
    assert report.ok
    assert report.findings == ()
    assert set(report.checks_run) | set(report.checks_not_run) == set(CHECKS)
    assert "has no CUDA kernels to check" in report.checks_not_run["operators"]
    assert "does not compute through XLA" in report.checks_not_run["lowering"]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not model[0]._forward_hooks
    assert str(report).startswith("nvidia:A100-80GB: fits")


def test_a_mask_whose_size_depends_on_values_is_found_where_it_is():
    report = validate(Masking(), "tpu:v5e", torch.rand(2, 4))
    (problem,) = [p for p in found(report, "dynamic shapes") if "aten::" in p.message]
    assert problem.level == "error"
    assert "inner.1" in problem.where
    assert "test_validate.py:" in problem.where
    assert "compiles again for each new shape on tpu:v5e" in problem.message
    assert "torch.where" in problem.remedy
    assert not report.ok
    assert validate(Masking(), "nvidia:A100-80GB", torch.rand(2, 4)).ok  # there it costs a synchronisation only


def test_a_branch_on_a_value_is_found():
    report = validate(Branching(), "tpu:v5e", torch.rand(2, 4))
    assert any("branches on a tensor's value" in p.message for p in found(report, "dynamic shapes"))
    assert "only up to" in report.checks_not_run["dtypes"]


def test_a_dtype_the_kind_lacks_is_found_with_what_to_use_instead():
    report = validate(nn.Sequential(nn.Identity(), Doubled()), "apple:M4-Max", torch.rand(2, 4))
    (problem,) = found(report, "dtypes")
    assert problem.message.startswith("apple:M4-Max has no float64 (documented), which aten::")
    assert problem.where.startswith("1, test_validate.py:")
    assert problem.remedy == "convert to bfloat16 or float16 or float32 there"
    assert validate(Doubled(), "nvidia:A100-80GB", torch.rand(2, 4)).ok


class StoredInFloat8(nn.Module):
    """As people keep activations small: cast down, and back before anything is computed."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        small = x.to(torch.float8_e4m3fn)
        return self.linear(small.clone().reshape(-1).view(x.shape).to(x.dtype))


class MultipliedInFloat8(nn.Module):
    def forward(self, x):
        return x.to(torch.float8_e4m3fn) @ x.to(torch.float8_e4m3fn)


@pytest.mark.parametrize("kind", ["cpu", "nvidia:T4", "amd:MI300X", "nvidia:A100-80GB", "tpu:v5e"])
def test_a_cast_to_float8_and_back_runs_everywhere_and_is_told_as_stored(kind):
    report = validate(StoredInFloat8(), kind, torch.rand(2, 4))
    (problem,) = found(report, "dtypes")
    assert (problem.level, report.ok) == ("info", True)
    assert problem.message.startswith(f"float8_e4m3fn is stored on {kind} and converted to compute")
    assert "test_validate.py:" in problem.where


def test_what_is_stored_natively_is_not_told_and_what_cannot_be_held_is_an_error():
    assert found(validate(StoredInFloat8(), "nvidia:H100-80GB", torch.rand(2, 4)), "dtypes") == []
    assert not validate(StoredInFloat8(), "apple:M4-Pro", torch.rand(2, 4)).ok


def test_a_product_in_float8_needs_units():
    x = torch.rand(4, 4)
    (problem,) = found(validate(MultipliedInFloat8(), "nvidia:T4", x), "dtypes")
    assert problem.level == "error"
    assert "which aten::mm needs" in problem.message
    (slow,) = found(validate(MultipliedInFloat8(), "cpu", x), "dtypes")  # torch multiplies it there by conversion
    assert slow.level == "warning"
    assert found(validate(MultipliedInFloat8(), "nvidia:H100-80GB", x), "dtypes") == []


def test_a_cast_that_this_cpu_really_runs_is_no_error_of_its_back_end():
    model, x = StoredInFloat8(), torch.rand(2, 4)
    model(x)
    assert validate(model, backends.create("cpu"), x).ok


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("tpu:v99", "unknown kind 'tpu:v99'; did you mean 'tpu:v"),
        ("nvidia:H1000", "unknown kind 'nvidia:H1000'; did you mean 'nvidia:H100'"),
        ("intel:Gaudi3", "no back end computes on intel:Gaudi3; Polyfleet has no back end for Gaudi"),
    ],
)
def test_a_kind_that_nobody_lists_or_computes_on_is_refused(kind, said):
    with pytest.raises(UserError) as raised:
        validate(perceptron(), kind, torch.rand(2, 4))
    assert str(raised.value).startswith(said)
    assert raised.value.exit_code == 2


def test_a_kind_may_be_written_as_people_write_it():
    assert validate(perceptron(), "cuda:a100-80gb", torch.rand(2, 4)).kind == "nvidia:A100-80GB"
    assert validate(perceptron(), "Trainium2", torch.rand(2, 4)).kind == "neuron:trn2"


def test_of_a_model_sold_with_several_sizes_the_memory_is_not_guessed():
    reason = validate(perceptron(), "nvidia:A100", torch.rand(2, 4)).checks_not_run["memory"]
    assert "sold with several sizes of memory: give one of nvidia:A100-40GB" in reason


def test_what_lowers_for_neuron_is_not_what_is_here():
    told = validate(perceptron(), "neuron:trn1", torch.rand(2, 4))
    assert "lowering" not in told.checks_run
    assert told.checks_not_run["lowering"].startswith("this check needs a neuron device, for which neuronx-cc lowers")


def test_a_dtype_that_is_slow_there_is_a_warning():
    report = validate(perceptron().bfloat16(), "nvidia:T4", torch.rand(2, 4).bfloat16())
    (problem,) = found(report, "dtypes")
    assert (problem.level, report.ok) == ("warning", True)
    assert problem.message == "bfloat16 is not native on nvidia:T4 (documented): it is far slower"


@torch.library.custom_op("polyfleet_test::twice_on_cpu", mutates_args=(), device_types="cpu")
def twice_on_cpu(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice_on_cpu.register_fake
def _(x):
    return torch.empty_like(x)


class Custom(nn.Module):
    def forward(self, x):
        return twice_on_cpu(x)


def test_a_custom_operator_without_a_kernel_for_the_device_is_found():
    report = validate(nn.Sequential(Custom()), "nvidia:H100-80GB", torch.rand(2, 4))
    (problem,) = found(report, "custom operators")
    assert problem.message == "polyfleet_test::twice_on_cpu has kernels for CPU, none for CUDA"
    assert "torch.library" in problem.remedy
    assert found(validate(Custom(), "cpu", torch.rand(2, 4)), "custom operators") == []


def test_a_model_too_large_for_the_kind_is_found_without_allocating_it():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(40_000, 40_000) for _ in range(4)))
    report = validate(model, "tpu:v5e", torch.empty(1, 40_000, device="meta"))
    (problem,) = found(report, "memory")
    assert "inference needs 23.8" in problem.message
    assert "tpu:v5e has 16.00" in problem.message
    assert "meta device" in report.checks_not_run["graph breaks"]


def test_where_the_compiler_breaks_the_graph_is_told():
    report = validate(Printing(), "nvidia:A100-80GB", torch.rand(2, 4))
    (problem, *_) = found(report, "graph breaks")
    assert problem.level == "warning"
    assert "test_validate.py:" in problem.where


def test_a_kind_nobody_knows_the_dtypes_of_says_so():
    assert "give a model" in validate(perceptron(), "cuda", torch.rand(2, 4)).checks_not_run["dtypes"]


def test_a_back_end_that_is_here_is_asked_itself():
    backend = backends.create("cpu")
    report = validate(perceptron(), backend, torch.rand(2, 4))
    assert report.ok
    assert {"operators", "memory", "dtypes"} <= set(report.checks_run)


def test_bad_input_is_one_clear_error_each():
    for call, said in (
        (lambda: validate(lambda x: x, "cpu", torch.rand(1)), r"must be a torch\.nn\.Module, not function"),
        (lambda: validate(perceptron(), "cudda:H100", torch.rand(2, 4)), "did you mean 'cuda'"),
        (lambda: validate(perceptron(), "cpu", None), "needs a sample input"),
        (lambda: validate(perceptron(), "cpu", torch.rand(2, 5)), "the model fails on its sample input"),
    ):
        with pytest.raises(UserError, match=said):
            call()


@pytest.mark.skipif(not WITH_XLA, reason="torch-xla does not run here")
def test_xla_itself_names_what_it_cannot_lower():
    class Unlowered(nn.Module):
        def forward(self, x):
            return torch.linalg.eigh(x @ x.T)[0]

    report = validate(Unlowered(), "tpu:v5e", torch.rand(3, 3))
    assert "lowering" in report.checks_run
    assert any("aten::" in p.message for p in found(report, "lowering")) or report.ok
    plain = validate(perceptron(), "tpu:v5e", torch.rand(2, 4))
    assert found(plain, "lowering") == []


FAILING = """
import torch
from torch import nn
from cluster.errors import UserError
from workers import estimate_memory, validate

class ReadsItem(nn.Module):
    def forward(self, x):
        return x[: x.sum().item()]

wrong, sample = nn.Linear(5, 4), torch.ones(2, 4)  # weights for another size than the sample's
for fails in (lambda: validate(wrong, "cpu", sample), lambda: estimate_memory(wrong, sample_input=sample)):
    try:
        fails()
    except UserError as e:
        print(e.message)
found = validate(ReadsItem(), "cpu", torch.ones(2, 4, dtype=torch.long)).findings
print([p.check for p in found if p.check == "graph breaks"])
"""


def test_of_a_model_that_fails_our_error_is_all_that_is_told():
    """torch logs a traceback of thirty lines for each operator that fails on fake tensors, and each graph break."""
    done = subprocess.run([sys.executable, "-c", FAILING], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.count("a and b must have same reduction dim") == 2
    assert "graph breaks" in done.stdout


def test_a_mistake_of_any_kind_in_forward_is_told_as_the_models():
    class Misspelt(nn.Module):
        def forward(self, x):
            return x.nothing

    with pytest.raises(UserError, match=r"the model fails on this sample input: .* has no attribute 'nothing'"):
        estimate_memory(Misspelt(), sample_input=torch.ones(2, 4))

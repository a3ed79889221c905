"""Names that users call on a back end, and that its contract leaves to functions."""

import ast
import copy
import inspect
import pickle
import subprocess
import sys
import traceback
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

from workers import kernels
from workers.devices import backends
from workers.devices.backends import device_facts, dtype_checks, random_state
from workers.devices.backends.base import BaseBackend
from workers.devices.backends.user_methods import FUNCTIONS, PROPERTIES, UserMethods, overridable
from workers.devices.backends.vendors.cpu import CPUBackend
from workers.models import compat

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor imports what torch deprecates
ROOT = Path(__file__).parents[4]
HERE = [pytest.param(n, marks=[pytest.mark.gpu] if n == "nvidia" else []) for n in backends.available()]
ATTRIBUTES = {"report", "fallback_from", "fallback_reason"}
USER_NAMES = {name for names in FUNCTIONS.values() for name in names} | ATTRIBUTES
ALWAYS_OFFERED = {
    *("BACKEND_NAME", "unavailable_reason", "is_available", "count_devices", "device_count", "device_name", "kind"),
    *("get_device_info", "get_all_devices", "set_device", "emulated", "traits", "to_device", "synchronize"),
    *("step_boundary", "empty_cache", "get_memory_stats", "max_memory_bytes", "max_shared_memory_bytes", "peak_of"),
    *("allocate", "free", "seed", "rng_type", "rng_state", "accepts_rng_state", "set_rng_state", "precision"),
    *("dtype_support", "supports_dtype", "supported_dtypes", "require_dtype", "autocast", "collective_backend"),
    *("init_group", "data_parallel", "prepare", "prepare_model", "prepare_model_with_custom_kernels"),
    *("prepare_training", "optimize_for_training", "optimize_for_inference"),
    *("report", "fallback_from", "fallback_reason"),
}
"""What users could call before most of it became functions."""
BACK_ENDS = {"backend", "_backend", "create", "get_backend", "backend_of", "create_with_memory_check"}
"""Last names of expressions that are a back end in the product."""


def public(names):
    return {name for name in names if not name.startswith("_")}


@pytest.fixture(params=HERE)
def backend(request):
    with backends.create(request.param) as created:
        yield created


def test_the_contract_has_at_most_twenty_public_names_inherited_ones_included():
    assert len(public(dir(BaseBackend))) <= 20, sorted(public(dir(BaseBackend)))
    assert not public(dir(BaseBackend)) & USER_NAMES


@pytest.mark.parametrize("vendor", backends.names())
def test_every_vendor_offers_the_names_that_users_know_and_fills_none_of_them(vendor):
    cls = backends.load(vendor)
    assert not ALWAYS_OFFERED - public(dir(cls))
    filled = {name for base in cls.__mro__ if base is not UserMethods for name in vars(base)}
    assert not filled & USER_NAMES


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in FUNCTIONS.items() for name in names])
def test_every_name_is_a_function_over_a_back_end_that_one_may_override(module, name):
    function = getattr(import_module(module), name)
    first, *others = inspect.signature(function).parameters
    assert first == "backend"
    assert function.__code__ is overridable(function).__code__, "it is decorated"
    assert not others or name not in PROPERTIES


def test_each_name_gives_what_its_function_gives(backend):
    for module, names in FUNCTIONS.items():
        for name in set(names) & PROPERTIES:
            assert getattr(backend, name) == getattr(import_module(module), name)(backend)
    assert backend.get_all_devices()[0].kind == backend.kind
    assert backend.max_memory_bytes() == backend.get_memory_stats()["total_bytes"]
    assert backend.max_shared_memory_bytes() == device_facts.max_shared_memory_bytes(backend)
    assert backend.supports_dtype("float32")
    assert backend.supported_dtypes() == dtype_checks.supported_dtypes(backend)
    assert backend.require_dtype("float32") is None


def test_random_numbers_repeat_by_the_methods_and_by_the_functions(backend):
    backend.seed(3)
    state = copy.deepcopy(backend.rng_state())
    assert backend.accepts_rng_state(state)
    drawn = torch.rand(3, device=backend.device).cpu()
    for restore in (
        lambda: backend.set_rng_state(state),
        lambda: random_state.set_rng_state(backend, state),
        lambda: random_state.seed(backend, 3),
    ):
        restore()
        assert torch.equal(torch.rand(3, device=backend.device).cpu(), drawn)


def test_models_are_prepared_by_every_name_and_the_report_says_what_was_done(backend):
    model, sample = nn.Linear(4, 2), torch.rand(3, 4)
    assert backend.report is None
    assert isinstance(backend.prepare_model(model, "O1", sample), nn.Linear)
    assert backend.report.applied[0] == "placement"
    assert not backend.optimize_for_inference(model, sample).training
    assert backend.prepare_model(model, optimization_level="O0").weight.device == backend.device
    assert backend.prepare(model, "O0").applied == ["placement"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert backend.optimize_for_training(model, optimizer)[1] is optimizer
    assert isinstance(backend.optimize_for_training(model), nn.Linear)
    assert backend.prepare_training(model).model is backend.report.model
    with backends.create(backend.BACKEND_NAME) as other:
        assert other.report is None


def test_kernels_are_inserted_by_the_method(tmp_path, monkeypatch):
    if not kernels.unavailable_reason("cpu"):
        kernels.create("cpu").device_info()  # compiled where other tests have it from, in seconds
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path))
    backend = backends.create("cpu")
    assert isinstance(backend.prepare_model_with_custom_kernels(nn.Linear(4, 2), torch.rand(3, 4)), nn.Module)
    assert backend.report.applied[0] == "placement"


class Counting(CPUBackend):
    """A vendor from outside that adds to methods and replaces a property."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.calls = []

    def prepare(self, model, *arguments, **options):
        self.calls.append("prepare")
        return super().prepare(model, *arguments, **options)

    def supports_dtype(self, dtype):
        return dtype == "float32" and super().supports_dtype(dtype)

    def seed(self, number):
        self.calls.append(number)
        super().seed(number)

    @property
    def kind(self):
        return f"{super().kind}:counting"


def test_a_vendor_overrides_any_of_the_names_and_calls_ours_by_super():
    backend = Counting()
    backend.prepare_model(nn.Linear(2, 2), "O0")
    backend.seed(5)
    assert backend.calls == ["prepare", 5]
    assert backend.kind == f"{CPUBackend().kind}:counting"
    assert backend.supported_dtypes() == frozenset()
    assert CPUBackend().supports_dtype("int64")


def test_our_functions_use_what_a_vendor_overrides():
    backend = Counting()
    compat.prepare_model(backend, nn.Linear(2, 2), "O0")
    random_state.seed(backend, 7)
    assert backend.calls == ["prepare", 7]
    assert device_facts.kind(backend) == f"{CPUBackend().kind}:counting"
    assert not dtype_checks.supports_dtype(backend, "int64")


class FromTheContract(BaseBackend):
    BACKEND_NAME = "cpu"
    unavailable_reason = CPUBackend.unavailable_reason
    count_devices = CPUBackend.count_devices
    get_memory_stats = CPUBackend.get_memory_stats
    collective_backend = CPUBackend.collective_backend
    _device = CPUBackend._device

    def prepare_model(self, model, *arguments, **options):
        return super().prepare_model(model, *arguments, **options).eval()

    def optimize_for_training(self, model, *arguments, **options):
        return BaseBackend.optimize_for_training(self, model, *arguments, **options)


def test_a_class_derived_from_the_contract_calls_ours_too_by_super_or_by_the_base():
    assert not FromTheContract().prepare_model(nn.Linear(2, 2), "O0").training
    assert isinstance(FromTheContract().optimize_for_training(nn.Linear(2, 2)), nn.Linear)


def test_the_names_can_be_read_on_the_class_and_have_their_signature():
    assert CPUBackend.prepare_model.__doc__ == compat.prepare_model.__doc__
    assert list(inspect.signature(CPUBackend().prepare_model).parameters)[:2] == ["model", "level"]
    assert isinstance(inspect.getattr_static(CPUBackend, "kind"), property)
    with pytest.raises(AttributeError):
        CPUBackend().kind = "other"


def test_a_misspelt_name_is_answered_with_the_nearest():
    with pytest.raises(AttributeError) as caught:
        CPUBackend().prepare_modle(nn.Linear(2, 2))
    shown = subprocess.run(
        [sys.executable, "-c", "import workers; workers.CPUBackend().prepare_modle"], capture_output=True, text=True
    )
    assert "has no attribute 'prepare_modle'" in traceback.format_exception(caught.value)[-1]
    assert "Did you mean: 'prepare_model'?" in shown.stderr
    with pytest.raises(AttributeError, match="type object 'BaseBackend' has no attribute 'prepare_modle'"):
        _ = BaseBackend.prepare_modle


def test_a_back_end_is_copied_and_pickled_and_has_no_names_but_those_it_lists():
    backend = CPUBackend()
    backend.prepare_model(nn.Linear(2, 2), "O0")
    assert copy.deepcopy(backend) is backend
    assert copy.copy(backend).report is backend.report
    assert pickle.loads(pickle.dumps(backend)).kind == backend.kind
    assert not hasattr(backend, "__wrapped__")
    assert not hasattr(backend, "__array__")
    assert not hasattr(backend, "_ipython_display_")


def test_a_back_end_and_its_dtypes_need_nothing_above_the_back_ends():
    """The names of preparation are bound when they are first used."""
    code = (
        "import sys; from workers.devices import backends; b = backends.create('cpu'); b.seed(1); b.kind;"
        "b.supports_dtype('float32'); print([m for m in sys.modules if m.startswith('workers.models')])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_the_product_calls_the_functions_which_the_type_checker_knows():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} .{node.attr}"
        for folder in ("cluster", "workers", "orchestrator")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in USER_NAMES and last_name(node.value) in BACK_ENDS
    ]
    assert not found, "\n".join(found)


def last_name(expression):
    if isinstance(expression, ast.Call):
        return last_name(expression.func)
    return expression.attr if isinstance(expression, ast.Attribute) else getattr(expression, "id", "")

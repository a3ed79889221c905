"""Whatever is given to a public function, what comes out is an answer or our error, and never a raw one of Python's."""

import pytest
import torch
from torch import nn

import workers
from cluster.errors import PolyfleetError
from workers.models.memory.transformer_shape import TransformerShape

MODEL, SAMPLE = nn.Linear(2, 2), torch.ones(1, 2)
WRONG = (
    *(None, 0, -1, 1.5, 10**400, float("nan"), True, "", " ", "nope", "a:b", b"cpu", object(), int, nn.Linear(2, 2)),
    *([], [1], [None], {}, {"x": 1}, {"cpu": "x"}, {1: 2}, ("cpu",), torch.ones(2)),
)


def library(name):
    with workers.get_backend("cpu", {"libraries": {"disabled": name}}):
        pass


CALLS = {
    "get_backend": lambda v: workers.get_backend(v),
    "get_backend, config": lambda v: workers.get_backend("cpu", config=v),
    "get_backend, any with config": lambda v: workers.get_backend(config=v),
    "get_backend, fallbacks": lambda v: workers.get_backend("cpu", fallback_backends=v),
    "get_backend, device": lambda v: workers.get_backend("cpu", device_id=v),
    "a class, config": lambda v: workers.CPUBackend(config=v),
    "an absent class, config": lambda v: workers.NeuronBackend(config=v),
    "is_backend_available": lambda v: workers.is_backend_available(v),
    "get_backend_info": lambda v: workers.get_backend_info(v),
    "detect, priority": lambda v: workers.detect_best_backend(priority=v),
    "detect, workload": lambda v: workers.detect_best_backend(workload=v),
    "with memory, names": lambda v: workers.create_with_memory_check(v, 1),
    "with memory, bytes": lambda v: workers.create_with_memory_check("cpu", v),
    "with memory, config": lambda v: workers.create_with_memory_check("cpu", 1, config=v),
    "summary, config": lambda v: workers.print_backend_summary(v),
    "summary, file": lambda v: workers.print_backend_summary(file=v),
    "BackendType": lambda v: workers.BackendType.from_string(v),
    "OptimizationLevel": lambda v: workers.OptimizationLevel.from_string(v),
    "get_library": lambda v: workers.get_library(v),
    "libraries": library,
    "capabilities": lambda v: workers.capabilities(v),
    "capabilities, back end": lambda v: workers.capabilities("cpu", v),
    "estimate": lambda v: workers.estimate_memory(v),
    "estimate, batch": lambda v: workers.estimate_memory(MODEL, batch=v, sample_input=SAMPLE),
    "estimate, mode": lambda v: workers.estimate_memory(MODEL, mode=v, sample_input=SAMPLE),
    "estimate, optimizer": lambda v: workers.estimate_memory(MODEL, mode="training", optimizer=v, sample_input=SAMPLE),
    "estimate, loss": lambda v: workers.estimate_memory(MODEL, mode="training", loss=v, sample_input=SAMPLE),
    "estimate, sample": lambda v: workers.estimate_memory(MODEL, sample_input=v),
    "shape": lambda v: TransformerShape.from_config(v),
    "get_optimizer": lambda v: workers.get_optimizer(v),
    "get_optimizer, config": lambda v: workers.get_optimizer("cpu", v),
    "validate, model": lambda v: workers.validate(v, "cpu", SAMPLE),
    "validate, kind": lambda v: workers.validate(MODEL, v, SAMPLE),
    "validate, mode": lambda v: workers.validate(MODEL, "tpu:v5e", SAMPLE, mode=v),
    "config, a section": lambda v: workers.PolyfleetConfig(cpu=v),
    "config, backends": lambda v: workers.PolyfleetConfig(backends=v),
    "config, priority": lambda v: workers.PolyfleetConfig(priority=v),
    "config, libraries": lambda v: workers.PolyfleetConfig(libraries=v),
    "config, threads": lambda v: workers.PolyfleetConfig(cpu={"threads": v}),
    "config, precision": lambda v: workers.PolyfleetConfig(cpu={"precision": v}),
    "config, folder": lambda v: workers.PolyfleetConfig(tpu={"persistent_cache": v}),
}


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.mark.parametrize("name", CALLS)
def test_a_value_of_any_type_gives_an_answer_or_our_error(name):
    raw = {}
    for value in WRONG:
        try:
            CALLS[name](value)
        except PolyfleetError:
            continue
        except Exception as e:
            raw[repr(value)[:60]] = f"{type(e).__name__}: {e}"
    assert raw == {}


def test_a_mode_that_is_none_is_named_before_anything_is_traced():
    with pytest.raises(PolyfleetError, match="unknown mode 'train'; did you mean 'training'"):
        workers.validate(MODEL, "cpu", SAMPLE, mode="train")

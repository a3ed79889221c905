"""Each option of the configuration has an effect while its back end is entered, and none after it is left."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from cluster.errors import UserError
from workers import kernels as registry
from workers.devices import backends
from workers.devices.backends import torch_settings
from workers.kernels.dispatch.fastest import kind_of
from workers.kernels.dispatch.tuner import KernelMeasurement, Situation, software_of, store_measurement
from workers.options.config import PolyfleetConfig


def cpu(**options):
    return backends.create("cpu", config=PolyfleetConfig(cpu=options))


def test_threads_are_those_asked_for_and_then_those_of_before():
    before = torch.get_num_threads()
    with cpu(threads=before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_the_precision_of_products_is_set_and_set_back():
    before = torch.get_float32_matmul_precision()
    with cpu(float32_matmul="medium"):
        assert torch.get_float32_matmul_precision() == "medium"
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.filterwarnings("ignore")  # the profiler's own, of some releases of torch
@pytest.mark.parametrize(("choice", "operator"), [("flash", "flash"), ("math", "math"), ("auto", "flash")])
def test_the_chosen_kernel_of_attention_runs(choice, operator):
    query = torch.rand(1, 2, 32, 16)
    with cpu(attention=choice), profile(activities=[ProfilerActivity.CPU]) as seen:
        nn.functional.scaled_dot_product_attention(query, query, query)
    names = {event.key for event in seen.key_averages()}
    assert [n for n in names if "attention" in n and operator in n], names
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.math_sdp_enabled()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("speedup", "operator"), [(0.0, "flash"), (0.5, "flash"), (2.0, "math")])
def test_measured_attention_tries_the_fastest_kernel_first(speedup, operator, tmp_path, monkeypatch):
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path))
    if speedup:
        situation = Situation(kind_of(torch.device("cpu")), "attention", "float32", "prefill-s256-d16")
        software = software_of(registry.create("torch:math"))
        assert store_measurement(KernelMeasurement(situation, "torch:math", software, speedup, speedup, speedup))
    query = torch.rand(1, 2, 32, 16)
    with cpu(attention="measured"), profile(activities=[ProfilerActivity.CPU]) as seen:
        nn.functional.scaled_dot_product_attention(query, query, query)
    names = {event.key for event in seen.key_averages()}
    assert [n for n in names if "attention" in n and operator in n], names
    assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()


@pytest.mark.parametrize("vendor", ("nvidia", "amd"))
def test_gpus_have_cudnns_kernel_of_attention(vendor):
    assert getattr(PolyfleetConfig(**{vendor: {"attention": "cudnn"}}), vendor).attention == "cudnn"
    assert torch_settings.ALLOWED["cudnn"] in torch_settings.SDPA


def test_a_kernel_of_attention_that_the_device_lacks_is_refused_at_once_and_the_switches_are_set_back():
    undo = []
    with pytest.raises(UserError, match=r"attention is 'efficient', but torch .* has no such kernel for cpu"):
        torch_settings.attention("efficient", lambda change, *given: undo.append((change, given)), torch.device("cpu"))
    for change, given in reversed(undo):
        change(*given)
    query = torch.rand(1, 2, 32, 16)
    assert nn.functional.scaled_dot_product_attention(query, query, query).shape == query.shape


@pytest.mark.parametrize("allowed", [True, False])
def test_tf32_is_allowed_or_not_and_then_as_before(allowed):
    """A switch of the process, which a build for the CPU has too; its effect on products needs an NVIDIA device."""

    def state():
        owner = torch.backends.cuda.matmul
        return owner.fp32_precision if hasattr(owner, "fp32_precision") else owner.allow_tf32

    before, undo = state(), []
    torch_settings.tf32(allowed, lambda change, *given: undo.append((change, given)))
    assert state() in (("tf32", True) if allowed else ("ieee", False))
    for change, given in reversed(undo):
        change(*given)
    assert state() == before


def test_libraries_are_on_and_off_as_configured():
    config = PolyfleetConfig(libraries={"disabled": ["mkldnn", "mha"]})
    with backends.create("cpu", config=config):
        assert not torch.backends.mkldnn.enabled
        assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.mkldnn.enabled
    assert torch.backends.mha.get_fastpath_enabled()
    with (
        pytest.raises(UserError, match="did you mean 'onednn'"),
        backends.create("cpu", config=PolyfleetConfig(libraries={"disabled": ["onednm"]})),
    ):
        pass


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor imports what torch deprecates
def test_the_compilers_mode_is_that_of_the_option():
    asked = cpu(compile_mode="max-autotune", engine="torch").prepare(nn.Linear(2, 2), "O2")
    assert "compile: inductor, max-autotune, at the first call" in asked.applied
    assert "compile: inductor, at the first call" in cpu(engine="torch").prepare(nn.Linear(2, 2), "O2").applied


@pytest.mark.skipif(find_spec("intel_extension_for_pytorch") is None, reason="IPEX is not in this environment")
def test_a_mode_of_torchs_compiler_is_refused_where_ipex_computes(monkeypatch):
    monkeypatch.setenv("POLYFLEET_CPU_ENGINE", "ipex")
    with pytest.raises(UserError, match=r"cpu\.compile_mode"):
        cpu(compile_mode="max-autotune")


def test_a_variable_is_set_for_a_while(monkeypatch):
    monkeypatch.delenv("NEURON_COMPILE_CACHE_URL", raising=False)
    undo = []
    torch_settings.variable("NEURON_COMPILE_CACHE_URL", "/cache", lambda change, *given: undo.append((change, given)))
    assert os.environ["NEURON_COMPILE_CACHE_URL"] == "/cache"
    for change, given in reversed(undo):
        change(*given)
    assert "NEURON_COMPILE_CACHE_URL" not in os.environ


def test_an_error_while_entering_gives_back_what_was_changed():
    class Failing(backends.load("cpu")):
        def _configure(self, later):
            super()._configure(later)
            raise RuntimeError("half way")

    before = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="half way"), Failing(PolyfleetConfig(cpu={"threads": before + 2})):
        pass
    assert torch.get_num_threads() == before


@pytest.mark.skipif(find_spec("intel_extension_for_pytorch") is None, reason="IPEX is not in this environment")
def test_the_engine_can_be_chosen_by_option():
    backend = cpu(engine="ipex")
    assert backend.get_device_info().kind == "cpu:ipex"
    assert "compile: IPEX operators" in backend.prepare(nn.Linear(4, 4).eval(), "O2", torch.ones(1, 4)).applied


@pytest.mark.skipif(os.environ.get("PJRT_DEVICE") != "CPU", reason="torch-xla does not run here")
def test_programs_are_kept_in_the_persistent_cache(tmp_path):
    """In a process of its own: XLA takes the folder before its first program only."""
    done = subprocess.run([sys.executable, "-c", CACHED, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert any(tmp_path.iterdir()), "no program was kept"


CACHED = """
import sys, torch
from workers.devices import backends
from workers.options.config import PolyfleetConfig
with backends.create("xla", config=PolyfleetConfig(tpu={"persistent_cache": sys.argv[1]})) as backend:
    x = torch.ones(64, 64, device=backend.device)
    print((x @ x + 3).sum().item())
    backend.synchronize()
"""


@pytest.mark.skipif(os.environ.get("PJRT_DEVICE") != "CPU", reason="torch-xla does not run here")
def test_the_precision_of_xlas_products_is_set_and_set_back():
    from torch_xla.backends import get_mat_mul_precision

    before = get_mat_mul_precision()
    with backends.create("xla", config=PolyfleetConfig(tpu={"matmul_precision": "highest"})):
        assert get_mat_mul_precision() == "highest"
    assert get_mat_mul_precision() == before


@pytest.mark.skipif(os.environ.get("PJRT_DEVICE") != "CPU", reason="torch-xla does not run here")
def test_a_topology_is_refused_where_there_is_none():
    with pytest.raises(UserError, match="XLA on the CPU has no topology"):
        backends.create("xla", config=PolyfleetConfig(tpu={"topology": "2,2,1"}))

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from cluster.errors import UserError
from workers.devices import backends
from workers.devices.backends import BackendUnavailable, import_error
from workers.options.config import PolyfleetConfig

ROOT = Path(__file__).parents[4]

IMPORT = "import sys, workers.devices.backends as b; print(','.join(b.names()), 'torch' in sys.modules)"


def test_importing_the_package_imports_no_torch_and_names_every_vendor_file():
    told = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout
    assert told.split() == ["amd,apple,cpu,intel,neuron,nvidia,tpu", "False"]


@pytest.mark.parametrize(
    ("word", "name"),
    [("cpu", "cpu"), ("CUDA", "nvidia"), ("rocm", "amd"), ("XLA", "tpu"), ("xpu", "intel"), ("mps", "apple")],
)
def test_a_backend_is_found_by_its_name_or_alias_in_any_case(word, name):
    assert name == backends.load(word).BACKEND_NAME


def test_an_unknown_word_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="did you mean 'nvidia'"):
        backends.load("nvidea")


def test_a_named_backend_that_is_absent_says_why_and_what_is_here():
    absent = next(name for name in backends.names() if name not in backends.available())
    with pytest.raises(BackendUnavailable) as caught:
        backends.create(absent)
    assert caught.value.args[0] == absent
    assert len(caught.value.args[1]) > 20
    assert "available here: " in caught.value.remedy
    assert "cpu" in caught.value.remedy


def test_an_unknown_cpu_engine_is_a_reason_not_a_silent_default(monkeypatch):
    monkeypatch.setenv("POLYFLEET_CPU_ENGINE", "mkl")
    with pytest.raises(BackendUnavailable, match="POLYFLEET_CPU_ENGINE is 'mkl'"):
        backends.create("cpu")


def test_an_engine_whose_library_is_missing_is_a_reason_not_a_silent_default(monkeypatch):
    monkeypatch.setenv("POLYFLEET_CPU_ENGINE", "ipex")
    monkeypatch.setitem(sys.modules, "intel_extension_for_pytorch", None)
    with pytest.raises(BackendUnavailable, match="ipex was requested, but intel_extension_for_pytorch"):
        backends.create("cpu")


def test_a_library_that_raises_at_import_is_a_reason_with_its_message(tmp_path, monkeypatch):
    """As torch-xla does under a torch that it was not built for."""
    (tmp_path / "ill_built.py").write_text("raise ImportError('_XLAC.so: undefined symbol: deleteNode')")
    monkeypatch.syspath_prepend(tmp_path)
    said = import_error("ill_built")
    assert f"ill_built does not load with torch {torch.__version__}: _XLAC.so: undefined symbol" in said
    assert import_error("nowhere_at_all") == "nowhere_at_all is not installed in this environment"
    assert import_error("json") == ""


def test_an_absent_backend_cannot_be_constructed_either():
    absent = next(name for name in backends.names() if name not in backends.available())
    with pytest.raises(BackendUnavailable, match=f"backend {absent!r} is not available here"):
        backends.load(absent)()


@pytest.mark.skipif(find_spec("intel_extension_for_pytorch") is not None, reason="IPEX is here")
def test_an_engine_that_is_absent_is_refused_when_asked_for_by_option():
    with pytest.raises(BackendUnavailable, match="the engine ipex was requested, but intel_extension_for_pytorch"):
        backends.create("cpu", config=PolyfleetConfig(cpu={"engine": "ipex"}))


TOY = """
from typing import Any
import torch
from workers.devices.backends.base import BaseBackend
from workers.devices.backends.device_facts import process_memory

class ToyBackend(BaseBackend):
    BACKEND_NAME = "toy"

    @classmethod
    def unavailable_reason(cls) -> str:
        return ""

    @classmethod
    def count_devices(cls) -> int:
        return 1

    def get_memory_stats(self) -> dict[str, int | None]:
        return process_memory()

    @property
    def collective_backend(self) -> str:
        return "gloo"

    def _device(self, device_id: int) -> torch.device:
        return torch.device("cpu")

    def _info(self) -> dict[str, Any]:
        return {"device_name": "A toy"}
"""
SEEN = (
    "from workers.devices import backends; b = backends.create('toy'); "
    "print(b.get_device_info().device_name, backends.names())"
)


@pytest.fixture
def toy(tmp_path):
    """A distribution as pip leaves it: one module, and metadata that names its entry point."""
    (tmp_path / "toy_vendor.py").write_text(TOY)
    metadata = tmp_path / "toy_vendor-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-vendor\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[polyfleet.backends]\ntoy = toy_vendor:ToyBackend\n")
    return {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}


def test_a_vendor_from_outside_the_package_is_found_by_its_entry_point(toy):
    done = subprocess.run([sys.executable, "-c", SEEN], capture_output=True, text=True, env=toy, check=True)
    assert done.stdout.startswith("A toy (")
    assert "'toy'" in done.stdout


def test_a_vendor_from_outside_passes_the_contract_suite(toy):
    suite = Path(__file__).parent / "test_contract.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "toy", str(suite)]
    done = subprocess.run(command, capture_output=True, text=True, env=toy, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 25

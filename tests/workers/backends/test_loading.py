import subprocess
import sys

import pytest

from cluster.errors import UserError
from workers import backends
from workers.errors import BackendUnavailable

IMPORT = "import sys, workers.backends as b; print(','.join(b.NAMES), 'torch' in sys.modules)"


def test_importing_the_package_imports_no_torch_and_names_every_vendor_file():
    told = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout
    assert told.split() == ["amd,cpu,intel,nvidia,tpu", "False"]


@pytest.mark.parametrize(
    ("word", "name"), [("cpu", "cpu"), ("CUDA", "nvidia"), ("rocm", "amd"), ("XLA", "tpu"), ("xpu", "intel")]
)
def test_a_backend_is_found_by_its_name_or_alias_in_any_case(word, name):
    assert name == backends.load(word).BACKEND_NAME


def test_an_unknown_word_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="did you mean 'nvidia'"):
        backends.load("nvidea")


def test_a_known_vendor_without_a_file_says_so():
    with pytest.raises(BackendUnavailable, match="this version of Polyfleet cannot compute on it"):
        backends.load("apple")


def test_a_named_backend_that_is_absent_says_why_and_what_is_here():
    absent = next(name for name in backends.NAMES if name not in backends.available())
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
    with pytest.raises(BackendUnavailable, match="intel_extension_for_pytorch does not load"):
        backends.create("cpu")

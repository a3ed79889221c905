"""What is written about kinds, and what a device answers; test_other_environment.py asks XLA too."""

import json
import os
import subprocess
import sys

import pytest
import torch

from cluster import catalogue
from cluster.catalogue.precision import FLOATS
from cluster.errors import UserError
from workers import capabilities
from workers.devices import backends
from workers.devices.capability.documented import device_facts
from workers.devices.capability.hardware import HardwareDetector
from workers.models.validation.probes import probe_results

NAMES = [name for name in backends.available() if name != "nvidia"]


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path))


def values(kind):
    return {name: known.value for name, known in capabilities(kind).dtypes.items()}


def test_every_kind_of_the_catalogue_has_capabilities():
    for kind in catalogue.models():
        assert capabilities(kind).kind == kind


def test_a_mig_slice_has_the_facts_of_its_card_and_an_unlisted_kind_none():
    assert device_facts("nvidia:H100-80GB-MIG-1g.10gb") == device_facts("nvidia:H100-80GB")
    assert device_facts("nvidia:H100-80GB").bf16_tflops == 989
    assert device_facts("nvidia:Unheard-1") is None


def test_generations_differ_in_what_they_compute_with():
    assert values("nvidia:T4")["bfloat16"] == "emulated"
    assert values("nvidia:A100-80GB")["bfloat16"] == "native"
    assert values("nvidia:A100-80GB")["float8_e4m3fn"] == "absent"
    assert values("nvidia:H100-80GB")["float8_e4m3fn"] == "native"
    assert values("tpu:v5e")["float16"] == values("tpu:v5e")["float64"] == "absent"
    assert values("apple:M4-Max")["float64"] == "absent"


def test_the_flavours_of_fp8_are_told_apart():
    flavours = {k: capabilities(k).fp8_flavour.value for k in ("amd:MI300X", "amd:MI355X", "nvidia:H200", "tpu:v5e")}
    assert flavours == {"amd:MI300X": "fnuz", "amd:MI355X": "fn", "nvidia:H200": "fn", "tpu:v5e": "none"}


def test_what_nobody_wrote_down_is_unknown_rather_than_guessed():
    told = capabilities("nvidia")
    assert told.dtypes["bfloat16"].label == told.fp8_flavour.label == "unknown"
    assert told.native("bfloat16") is None
    assert told.native("float32")
    assert capabilities("nvidia:Unheard-1").dtypes["float16"].label == "unknown"
    assert capabilities("cpu").dtypes["bfloat16"].label == "unknown"  # it depends on the instruction set


@pytest.mark.parametrize(
    ("kind", "architecture"), [("nvidia:A100-80GB", "sm_80"), ("nvidia:A10G", "sm_86"), ("nvidia:L40S", "sm_89")]
)
def test_the_longest_listed_kind_decides(kind, architecture):
    assert catalogue.architecture_of(kind) == architecture


def test_every_value_says_how_it_is_known():
    told = capabilities("cuda:H100-80GB").to_dict()
    assert told["kind"] == "nvidia:H100-80GB"
    for known in (*told["dtypes"].values(), told["compile"], told["collectives"], told["custom_kernels"]):
        assert known["label"] in ("documented", "unknown")
        assert known["source"] or known["label"] == "unknown"
    with pytest.raises(UserError, match="did you mean 'nvidia'"):
        capabilities("nvidea:H100")


@pytest.mark.parametrize("name", NAMES)
def test_once_a_device_was_asked_who_only_looks_gives_the_same_answer(name):
    """The detector opens no device: it tells documents, until the answers of a probe are kept."""
    backend = backends.create(name)
    looked = [d for d in HardwareDetector().detect().devices if d.backend == name]
    assert {d.dtypes_from for d in looked} == {"documented"}
    told = backend.get_device_info()
    (found, *_) = [d for d in HardwareDetector().detect().devices if d.backend == name]
    assert found.dtypes_from == told.dtypes_from == "probed"
    assert set(found.supported_dtypes) & set(FLOATS) == set(told.supported_dtypes) & set(FLOATS)
    assert backend.supports_dtype("bfloat16") == ("bfloat16" in found.supported_dtypes)


@pytest.mark.parametrize("name", NAMES)
def test_a_device_that_is_here_is_asked_and_its_answers_are_kept(name, tmp_path):
    backend = backends.create(name)
    kind = backend.get_device_info().kind
    told = capabilities(kind, backend)
    assert (told.dtypes["float32"].value, told.dtypes["float32"].label) == ("native", "probed")
    assert told.compile.label == told.flash_attention.label == "probed"
    assert told.collectives.value == backend.collective_backend
    (kept,) = (tmp_path / "capabilities").iterdir()
    answers = json.loads(kept.read_text())
    kept.write_text(json.dumps(answers | {"compile": "as kept"}))
    assert capabilities(kind, backend).compile.value == "as kept"
    kept.write_text("{")
    assert set(probe_results(backend)["dtypes"]) <= set(answers["dtypes"])


def test_float16_without_units_is_not_called_native():
    """The trap of CPUs with bfloat16 units alone: a product in float16 takes many times as long."""
    backend = backends.create("cpu")
    answers = probe_results(backend)["dtypes"]
    flags = backend.get_device_info().properties
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        if not any(flags.get(one) for one in catalogue.instruction_sets(name)):
            assert answers[name] == "emulated", flags
        assert backend.supports_dtype(name) == (answers[name] == "native")
        assert (dtype in backend.supported_dtypes()) == (name in backend.get_device_info().supported_dtypes)
        assert (dtype in backend.supported_dtypes()) == backend.supports_dtype(dtype)


def test_require_dtype_follows_the_probe_where_units_are_kept_from_torch(tmp_path):
    """A process that may use AVX2 alone has no native float16 or bfloat16, whatever this CPU has."""
    limits = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "POLYFLEET_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", ASKED], env=os.environ | limits, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    for name in ("bfloat16", "float16"):
        assert told["native"][name] is False
        assert told["capabilities"][name] == "emulated"
        assert "has no native" in told["refused"][name]
        assert name not in told["listed"]


ASKED = """
import json
import os
import subprocess
import sys
from workers import capabilities
from workers.devices import backends
from cluster.errors import UserError
backend = backends.create("cpu")
names, refused = ("bfloat16", "float16"), {}
for name in names:
    try:
        backend.require_dtype(name)
        refused[name] = ""
    except UserError as e:
        refused[name] = str(e)
known = capabilities("cpu", backend).dtypes
print(json.dumps({
    "native": {name: backend.supports_dtype(name) for name in names},
    "capabilities": {name: known[name].value for name in names},
    "listed": list(backend.get_device_info().supported_dtypes),
    "refused": refused,
}))
"""


@pytest.mark.skipif("tpu" not in NAMES, reason="torch-xla does not run here")
def test_what_xla_loses_or_refuses_is_absent():
    answers = probe_results(backends.create("xla"))["dtypes"]
    assert answers["complex128"] == answers["float8_e4m3fnuz"] == "absent"

"""Every library is switched on and off for real, and what then ran is looked at; under both releases of torch."""

import subprocess
import sys

import pytest
import torch

from cluster.errors import UserError
from workers import get_library, list_libraries
from workers.devices.libraries.__main__ import rows
from workers.devices.libraries.effect_check import check_effect, checkable_libraries, run_in_new_process
from workers.devices.libraries.registry import LIBRARIES
from workers.options.config import LibrariesConfig, PolyfleetConfig
from workers.options.library_config import apply

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),  # the profiler's own
]
FOURTEEN = "cuda cpu mps cudnn mkl mkldnn openmp nki triton cusparselt mha nnpack opt_einsum xeon"
IN_PROCESS = [name for name in checkable_libraries() if LIBRARIES[name].switch is not None]
FRESH = [name for name in checkable_libraries() if name in ("cpu", "openmp", "xeon")]


def test_all_fourteen_are_told_with_a_version_or_a_reason():
    assert list_libraries() == FOURTEEN.split()
    told = {row["name"]: row for row in rows()}
    assert all(row["available"] or len(row["reason"]) > 10 for row in told.values())
    assert told["mkldnn"]["version"].count(".") == 2
    assert told["mkldnn"]["flags"] == ["USE_MKLDNN=ON"]
    assert (told["cudnn"]["requires_gpu"], told["cudnn"]["devices"]) == (True, ["nvidia"])
    assert told["mkl"]["switch"] == ""
    assert told["mkl"]["enabled"] is None


@pytest.mark.parametrize("name", IN_PROCESS)
@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
def test_a_switch_takes_effect_and_is_set_back(name, on):
    library = LIBRARIES[name]
    before = library.switch.read()
    shown = check_effect(library, on)
    assert shown.effective, shown.evidence
    assert library.switch.read() == before


@pytest.mark.parametrize("name", FRESH)
@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
def test_what_only_a_fresh_process_takes_up_is_seen_there(name, on):
    shown = check_effect(LIBRARIES[name], on)
    assert shown.effective, shown.evidence


@pytest.mark.skipif("mkl" not in checkable_libraries(), reason="this torch has no MKL")
def test_mkl_tells_of_its_products_itself_and_cannot_be_switched_off():
    shown = check_effect(get_library("mkl"), True)
    assert shown.effective
    assert "SGEMM(" in shown.evidence
    with pytest.raises(UserError, match="no check shows whether Intel MKL is off"):
        check_effect(get_library("mkl"), False)
    with pytest.raises(UserError, match="cannot be switched in a running process; it is part of this build"):
        get_library("mkl").disable().__enter__()


def test_switching_onednn_touches_neither_precision_nor_determinism():
    """torch.backends.mkldnn.flags() and set_flags(deterministic=True) do: they are not used."""
    state = torch.backends.mkldnn

    def others():
        return state.deterministic, getattr(state, "fp32_precision", None), torch.get_float32_matmul_precision()

    before = others()
    with get_library("onednn").disable():
        assert not state.enabled
        assert others() == before
    assert state.enabled
    assert others() == before


def test_switches_nest_and_are_set_back_after_an_error():
    mha = get_library("mha")
    with pytest.raises(RuntimeError, match="inside"), mha.disable():
        with mha.enable():
            assert torch.backends.mha.get_fastpath_enabled()
        assert not torch.backends.mha.get_fastpath_enabled()
        raise RuntimeError("inside")
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_configuration_enables_and_disables():
    with apply(LibrariesConfig(disabled=["mha", "nnpack"])):
        assert not LIBRARIES["mha"].switch.read()
        assert not LIBRARIES["nnpack"].switch.read()
        assert LIBRARIES["mkldnn"].switch.read()
    with apply(PolyfleetConfig(libraries={"enabled": ["mkldnn"]})):
        assert LIBRARIES["mkldnn"].switch.read()
        assert not LIBRARIES["mha"].switch.read()
    assert LIBRARIES["mha"].switch.read()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"disabled": ["onednm"]}, "unknown library 'onednm'; did you mean 'onednn'"),
        ({"enabled": ["nki"]}, "Neuron Kernel Interface cannot be used here: neuronx-cc"),
        ({"disabled": ["mkl"]}, "mkl cannot be switched in a running process"),
        ({"enabled": ["mha"], "disabled": ["mha"]}, "mha is both enabled and disabled"),
    ],
)
def test_what_cannot_be_configured_is_refused_and_nothing_is_switched(given, said):
    before = [library.switch.read() for library in LIBRARIES.values() if library.switch and library.available]
    with pytest.raises(UserError, match=said), apply(PolyfleetConfig(libraries=given)):
        pass
    assert [x.switch.read() for x in LIBRARIES.values() if x.switch and x.available] == before


def test_what_is_not_here_says_why_when_it_is_asked_for():
    with pytest.raises(UserError, match="Neuron Kernel Interface cannot be used here"):
        get_library("NKI").enable()
    with pytest.raises(UserError, match="did you mean 'triton'"):
        get_library("tritn")
    with pytest.raises(UserError, match="cannot be switched off"):
        run_in_new_process(get_library("mkl"), False, ["-c", "pass"])


def test_importing_the_registry_imports_no_torch():
    code = "import sys, workers.devices.libraries.registry; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"

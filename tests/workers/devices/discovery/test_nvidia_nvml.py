"""What a call of NVML costs that fails: one field or one card. The answers are made by hand after NVML's reference, the
errors are those of nvidia-ml-py; no card was asked.
"""

from types import SimpleNamespace as Plain

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workers.devices.discovery.vendors import nvidia, nvidia_state
from workers.devices.discovery.vendors import nvidia_nvml as nvml

pynvml = pytest.importorskip("pynvml")

GiB = 1 << 30
SYSTEM = {
    "nvmlInit": lambda: None,
    "nvmlDeviceGetCount": lambda: 4,
    "nvmlSystemGetDriverVersion": lambda: "570.124.06",
    "nvmlSystemGetCudaDriverVersion_v2": lambda: 12080,
    "nvmlSystemGetCudaDriverVersion": lambda: 12080,
}
CARD = {
    "nvmlDeviceGetHandleByIndex": lambda card: card,
    "nvmlDeviceGetName": lambda card: "NVIDIA H100 80GB HBM3",
    "nvmlDeviceGetUUID": lambda card: f"GPU-{card}",
    "nvmlDeviceGetMemoryInfo": lambda card: Plain(total=80 * GiB, free=79 * GiB),
    "nvmlDeviceGetPciInfo": lambda card: Plain(busId=f"00000000:{card + 16:02X}:00.0", pciDeviceId=0x233010DE),
    "nvmlDeviceGetCudaComputeCapability": lambda card: (9, 0),
    "nvmlDeviceGetMigMode": lambda card: (0, 0),
    "nvmlDeviceGetEnforcedPowerLimit": lambda card: 700000,
    "nvmlDeviceGetRemappedRows": lambda card: (0, 0, 0, 0),
    "nvmlDeviceGetTotalEccErrors": lambda card, kind, since: 0,
    "nvmlDeviceGetCurrentClocksThrottleReasons": lambda card: 0,
}
CODES = sorted(
    value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_") and isinstance(value, int)
)
ILL = 2


@pytest.fixture
def answers(monkeypatch):
    """answers({"nvmlDeviceGetName": {2: 15}}): card 2's name ends in error 15 (None: every card's)."""

    def prepare(failing, **own):
        def answer(name, call):
            def told(*given):
                wrong = failing.get(name, {})
                code = wrong.get(given[0] if given else None, wrong.get(None))
                if code is not None:
                    raise pynvml.NVMLError(code)
                return call(*given)

            return told

        for name, call in {**SYSTEM, **CARD, **own}.items():
            monkeypatch.setattr(pynvml, name, answer(name, call))
        return nvidia.devices(nvidia.query_nvml(), None)

    return prepare


def facts(device):
    """What must not change when another card is ill."""
    return device.kind, device.index, device.uuid, device.total_memory_bytes, device.unavailable_reason


@pytest.mark.parametrize("call", CARD)
def test_a_call_that_fails_on_one_card_costs_at_most_that_card_whatever_the_error(call, answers):
    healthy, none = answers({})
    assert none == []
    for code in [*CODES[1:], 12345]:  # the first is success
        found, findings = answers({call: {ILL: code}})
        assert [facts(d) for d in found if d.index != ILL] == [facts(d) for d in healthy if d.index != ILL], code
        (ill,) = [d for d in found if d.index == ILL]
        lost = call == nvml.HANDLE or code in nvml.UNUSABLE
        assert lost == bool(ill.unavailable_reason), code
        if code in nvml.MISSING_FEATURE_CODES and call in nvml.OPTIONAL:
            assert findings == []
            continue
        (finding,) = findings
        assert finding.message.startswith("GPU 2") and f"{call} failed: " in finding.message, code
        assert finding.remedy and (finding.level == "error") == lost
        assert ill.kind == healthy[ILL].kind or lost, code


@pytest.mark.parametrize("call", SYSTEM)
def test_a_call_about_the_driver_that_fails_costs_no_card_unless_nvml_cannot_start(call, answers):
    for code in [*CODES[1:], 12345]:
        found, findings = answers({call: {None: code}})
        if call == "nvmlInit":
            assert found == [] and "nvmlInit failed: " in findings[0].message and findings[0].remedy
        else:
            assert [(d.kind, d.index) for d in found if d.index < 4] == [("nvidia:H100-80GB", i) for i in range(4)]
            older = call == "nvmlSystemGetCudaDriverVersion_v2" and code == nvml.FUNCTION_NOT_FOUND  # has the first one
            assert len(findings) == (call != "nvmlSystemGetCudaDriverVersion" and not older), code
            assert all(f.message.startswith("this machine: ") and f.remedy for f in findings)


@given(st.dictionaries(st.sampled_from([*SYSTEM, *CARD][1:]),
                       st.dictionaries(st.sampled_from([None, 0, 1, 2, 3]), st.sampled_from(CODES[1:]))))  # fmt: skip
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_fails_together_each_card_is_listed_or_named_and_each_finding_has_a_remedy(answers, failing):
    found, findings = answers(failing)
    if "nvmlDeviceGetCount" not in failing:
        assert [d.index for d in found] == [0, 1, 2, 3]
    assert all(f.remedy and f.message for f in findings)
    assert all(d.uuid and d.kind for d in found if not (d.unavailable_reason or failing.get("nvmlDeviceGetUUID")))


@pytest.mark.parametrize("call", [*list(SYSTEM)[2:4], *CARD])
def test_a_function_that_nvidia_ml_py_does_not_have_is_one_finding_for_all_cards(call, answers, monkeypatch):
    answers({})
    monkeypatch.delattr(pynvml, call)
    found, findings = nvidia.devices(nvidia.query_nvml(), None)
    assert len(found) == 4
    if call == "nvmlSystemGetCudaDriverVersion_v2":  # it has the older one
        assert findings == []
    else:
        (finding,) = findings
        assert "nvidia-ml-py has no such function" in finding.message
        assert all(f"GPU {i}" in finding.message for i in range(4)) or call in SYSTEM


def test_beside_a_lost_card_the_others_are_shown_to_cuda_by_their_uuid(answers):
    """CUDA does not count a lost card, so that NVML's number 3 is CUDA's 2."""
    assert "visible_as" not in answers({})[0][3].properties
    found, _ = answers({nvml.HANDLE: {ILL: nvml.GPU_IS_LOST}})
    assert [d.properties.get("visible_as") for d in found] == ["GPU-0", "GPU-1", None, "GPU-3"]


def test_no_more_is_asked_of_a_card_that_is_lost(answers):
    asked = []
    answers(
        {"nvmlDeviceGetMemoryInfo": {ILL: nvml.GPU_IS_LOST}},
        nvmlDeviceGetPciInfo=lambda card: asked.append(card) or CARD["nvmlDeviceGetPciInfo"](card),
    )
    assert asked == [0, 1, 3]


def test_a_card_whose_memory_is_not_told_has_that_of_its_model(answers):
    found, (finding,) = answers({"nvmlDeviceGetMemoryInfo": {ILL: 999}})
    assert [d.total_memory_bytes for d in found] == [80 * GiB, 80 * GiB, 80 * 10**9, 80 * GiB]
    assert "did not report its memory" in finding.message


@pytest.mark.parametrize("name", ["NVIDIA Graphics Device", "Graphics Device", ""])
def test_a_card_without_a_name_is_known_by_its_pci_id(name, answers):
    found, _ = answers({}, nvmlDeviceGetName=lambda card: name)
    assert {d.kind for d in found} == {"nvidia:H100-80GB"}
    new = Plain(busId="00000000:10:00.0", pciDeviceId=0xABCD10DE)
    found, _ = answers({}, nvmlDeviceGetName=lambda card: name, nvmlDeviceGetPciInfo=lambda card: new)
    assert {d.kind for d in found} == {"nvidia:0xabcd"}


def test_memory_that_is_not_supported_is_no_finding_where_it_is_the_machines(answers):
    gb10 = {"nvmlDeviceGetName": lambda card: "NVIDIA GB10", "nvmlDeviceGetCudaComputeCapability": lambda card: (12, 1)}
    no_memory = {"nvmlDeviceGetMemoryInfo": {None: nvml.NOT_SUPPORTED}}
    found, findings = answers(no_memory, **gb10)
    assert findings == []
    assert {(d.kind, d.total_memory_bytes, d.unified_memory) for d in found} == {("nvidia:GB10", 128 * 10**9, True)}
    assert "did not report its memory" in answers(no_memory)[1][0].message


SLICES = {
    "nvmlDeviceGetMigMode": lambda card: (int(card == 0), 0),
    "nvmlDeviceGetMaxMigDeviceCount": lambda card: 7,
    "nvmlDeviceGetMigDeviceHandleByIndex": lambda card, number: f"slice-{number}",
    "nvmlDeviceGetName": lambda card: CARD["nvmlDeviceGetName"](card) + (" MIG 1g.10gb" if card in SLICE else ""),
}
SLICE = [f"slice-{number}" for number in range(7)]


@pytest.mark.parametrize("call", ["nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlDeviceGetMemoryInfo"])
def test_a_call_that_fails_on_one_slice_costs_at_most_that_slice(call, answers):
    healthy, _ = answers({}, **SLICES)
    assert [d.kind for d in healthy] == ["nvidia:H100-80GB-MIG-1g.10gb"] * 7 + ["nvidia:H100-80GB"] * 3
    for code in CODES[1:]:
        found, (finding,) = answers({call: {SLICE[3]: code}}, **SLICES)
        assert [facts(d) for d in found[:3] + found[4:]] == [facts(d) for d in healthy[:3] + healthy[4:]]
        assert finding.message.startswith("GPU 0 (NVIDIA H100 80GB HBM3), slice 3") and call in finding.message
        assert bool(found[3].unavailable_reason) == (call != "nvmlDeviceGetMemoryInfo" or code in nvml.UNUSABLE)


def test_slices_that_nvml_does_not_tell_are_not_taken_for_none(answers):
    found, findings = answers({"nvmlDeviceGetMaxMigDeviceCount": {0: 999}}, **SLICES)
    assert found[0].unavailable_reason == (
        "MIG is on, but its slices are unknown: nvmlDeviceGetMaxMigDeviceCount failed: Unknown Error; "
        f"{nvml.DEFAULT_REMEDY}"
    )
    assert "nvmlDeviceGetMaxMigDeviceCount failed" in findings[0].message


def test_what_a_card_does_now_lacks_only_what_is_not_told(monkeypatch):
    """Whatever the error; and a function that is missing is like one that fails."""
    for code in CODES[1:]:

        def refuse(*given, code=code):
            raise pynvml.NVMLError(code)

        monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", refuse)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetTemperature", refuse)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda card: Plain(used=GiB))
        monkeypatch.delattr(pynvml, "nvmlDeviceGetPowerUsage", raising=False)
        told = nvidia_state.read_use(pynvml, 0)
        used = None if code in nvml.UNUSABLE else GiB
        assert told == {"busy_percent": None, "used_memory_bytes": used, "power_w": None, "temperature_c": None}

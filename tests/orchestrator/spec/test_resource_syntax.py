import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.errors import UserError
from orchestrator.spec.resource_syntax import MAX_COUNT, DeviceRequest, accelerators, duration_s, with_count


@pytest.mark.parametrize(
    ("text", "kinds", "low", "high"),
    [
        ("nvidia:H100:8", ("nvidia:H100",), 8, 8),
        ("NVIDIA:h100:8", ("nvidia:H100",), 8, 8),
        ("nvidia:A100-80GB,H100:8", ("nvidia:A100-80GB", "nvidia:H100"), 8, 8),
        ("tpu:v5e:4", ("tpu:v5e",), 4, 4),
        ("cpu:1", ("cpu",), 1, 1),
        ("cpu", ("cpu",), 1, 1),
        ("any", ("any",), 1, 1),
        ("Any:2", ("any",), 2, 2),
        ("cpu:ipex:1", ("cpu:ipex",), 1, 1),
        ("tpu:emulated:1", ("tpu:emulated",), 1, 1),
        ("H100:8", ("nvidia:H100",), 8, 8),
        ("h100", ("nvidia:H100",), 1, 1),
        ("A100-80GB:2", ("nvidia:A100-80GB",), 2, 2),
        ("mi300x:8", ("amd:MI300X",), 8, 8),
        ("H100,MI300X:8", ("nvidia:H100", "amd:MI300X"), 8, 8),
        ("v5e:4", ("tpu:v5e",), 4, 4),
        ("nvidia:H100:2..8", ("nvidia:H100",), 2, 8),
        ("nvidia:8+", ("nvidia",), 8, MAX_COUNT),
        ("nvidia:8", ("nvidia",), 8, 8),
        ("cuda:H100", ("nvidia:H100",), 1, 1),
        ("rocm", ("amd",), 1, 1),
        ("xla:v5p", ("tpu:v5p",), 1, 1),
        ("xpu", ("intel",), 1, 1),
        ("mps", ("apple",), 1, 1),
        ("nvidia:MyOwn-96GB:1", ("nvidia:MyOwn-96GB",), 1, 1),
        (" nvidia : H100 : 8 ", ("nvidia:H100",), 8, 8),
    ],
)
def test_accelerators_are_read_as_users_write_them(text, kinds, low, high):
    [wanted] = accelerators(text)
    assert (wanted.kinds, wanted.min_count, wanted.count) == (kinds, low, high)


def test_a_list_and_a_mapping_are_several_alternatives():
    several = (
        DeviceRequest(("nvidia:H100",), 8, 8, True),
        DeviceRequest(("tpu:v5e",), 4, 4, True),
        DeviceRequest(("cpu",)),
    )
    assert accelerators(["H100:8", "tpu:v5e:4", "cpu"]) == several
    assert accelerators({"H100": 8, "tpu:v5e": "4"}) == several[:2]
    assert accelerators([{"H100": 8}, "tpu:v5e:4"]) == several[:2]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("H10:8", "unknown accelerator 'H10'; did you mean 'H100'?"),
        ("nvida:H100:8", "unknown backend 'nvida'; did you mean 'nvidia'?"),
        ("any:H100", "'any:H100': `any` takes no model"),
        ("", "'' is not an accelerator"),
        ("nvidia:", "'nvidia:' is not an accelerator"),
        ("nvidia:H100:8:2", "'nvidia:H100:8:2' is not an accelerator"),
        ("nvidia:H100:0", "0 is not a valid range of devices"),
        ("nvidia:H100:8..2", "8..2 is not a valid range of devices"),
        ("nvidia:H100:99999", "99999 is not a valid range of devices"),
        ("nvidia:H/100", "'H/100' is not a model"),
        ("nvidia:../x", "'../x' is not a model"),
        ([], "does not name a device"),
        ({}, "does not name a device"),
        (None, "does not name a device"),
        (8, "does not name a device"),
        ([["H100"]], "does not name a device"),
        ({"H100:8": 8}, "the number of nvidia:H100 is set twice"),
        ({"H100": True}, "True is not a number of devices"),
        ({"H100": "many"}, "'many' is not a number of devices"),
    ],
)
def test_what_cannot_be_read_says_what_and_how_to_write_it(value, message):
    with pytest.raises(UserError) as raised:
        accelerators(value)
    assert message in str(raised.value)
    assert raised.value.remedy


@pytest.mark.parametrize(("count", "low", "high"), [(8, 8, 8), ("8", 8, 8), ("2..4", 2, 4), ("2+", 2, MAX_COUNT)])
def test_a_number_may_stand_beside_the_accelerator(count, low, high):
    assert with_count(DeviceRequest(("cpu",)), count) == DeviceRequest(("cpu",), high, low, True)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("30s", 30), ("5m", 300), ("1h30m", 5400), ("500ms", 0.5), ("2d", 172800), ("1.5s", 1.5), (20, 20), (0.5, 0.5)],
)
def test_durations_are_seconds(value, seconds):
    assert duration_s(value) == seconds


@pytest.mark.parametrize("value", ["", "30", "1:30", "-5s", "5 m", "s", -1, float("nan"), True, None, []])
def test_what_is_no_duration_is_refused(value):
    with pytest.raises(UserError, match="write a number and a unit"):
        duration_s(value)


@settings(max_examples=300, deadline=None)
@given(st.text("nvidatpucmHGB0123456789:,.+- \0é", max_size=30) | st.text(max_size=20))
@example("1" * 30)
@example(":" * 30)
@example("nvidia:H100:" + "9" * 20)
def test_no_text_does_anything_but_mean_devices_or_be_refused(text):
    try:
        wants = accelerators(text)
    except UserError as e:
        assert e.remedy
        return
    assert all(want.kinds and 1 <= want.min_count <= want.count <= MAX_COUNT for want in wants)

import math

import pytest
import torch
from torch import nn

from workers.checkpoint import LossyLoad, load, save
from workers.checkpoint.conversion.convert import check_convertible, put
from workers.checkpoint.conversion.load_report import ConversionLoss
from workers.errors import CheckpointError


@pytest.mark.parametrize(
    ("values", "source", "target", "change"),
    [
        ([1.0, 1.001, math.nan, math.inf], "float32", "bfloat16", ConversionLoss(1, 0, 0, 0.001)),
        ([7e4, -1.0], "float32", "float16", ConversionLoss(1, 1, 0, 0.0)),
        ([500.0, 1.0], "float32", "float8_e4m3fnuz", ConversionLoss(1, 0, 1, 0.0)),
        ([7e4, 1.0], "float32", "float8_e5m2", ConversionLoss(1, 1, 0, 0.0)),
        ([0.1, 0.5], "float64", "float32", ConversionLoss(1, 0, 0, abs(0.1 - 0.10000000149011612))),
        ([0.1, 448.0], "float8_e4m3fn", "bfloat16", ConversionLoss()),
        ([0.1, 57344.0], "float8_e5m2", "float16", ConversionLoss()),
        ([1 + 2j, 3 + 0j], "complex64", "float32", ConversionLoss(1, 0, 0, 2.0)),
        ([1, -2], "int64", "float32", ConversionLoss()),
        ([300, 5], "int64", "uint8", ConversionLoss(1, 0, 0, 256.0)),
        ([1.5, 2.0], "float32", "int32", ConversionLoss(1, 0, 0, 0.5)),
        ([True, False], "bool", "float32", ConversionLoss()),
        ([], "float64", "float16", ConversionLoss()),
    ],
)  # fmt: skip
def test_a_conversion_counts_what_it_changes(values, source, target, change):
    tensor = torch.tensor(values, dtype=torch.complex128 if "complex" in source else torch.float64)
    tensor = torch.tensor(values, dtype=torch.int64) if source in ("int64", "bool") else tensor
    tensor = tensor.to(getattr(torch, source))
    found = put(torch.empty(tensor.shape, dtype=getattr(torch, target)), tensor)
    assert found.max_abs_error == pytest.approx(change.max_abs_error, rel=0.05)
    assert (found.values_changed, found.new_inf, found.new_nan) == (
        change.values_changed, change.new_inf, change.new_nan,
    )  # fmt: skip


def test_integers_beyond_2_to_53_are_compared_exactly():
    large = torch.tensor([2**53, 2**53 + 1, 2**63 - 1, -(2**63)])
    assert put(torch.empty(4, dtype=torch.float64), large).values_changed == 2


def test_changes_are_counted_over_all_parts_of_a_large_tensor(tmp_path):
    large = torch.ones((1 << 20) + 5, dtype=torch.float64)
    large[[3, -1]] = 0.1
    save(tmp_path, 1, {"t": large})
    loaded = load(tmp_path, dtype={"float64": "float32"}, on_lossy="allow")
    assert loaded.report.tensors["t"].change.values_changed == 2
    assert torch.equal(loaded.state["t"], large.float())


def test_types_without_a_conversion_are_refused():
    with pytest.raises(CheckpointError, match="t: no conversion from uint32 to float32"):
        check_convertible("t", torch.uint32, torch.float32)


def test_a_lossy_load_into_a_live_model_is_refused_and_changes_nothing(tied, train, tmp_path, image):
    model = tied()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 2)
    save(tmp_path, 2, {"model": model, "optimizer": optimizer, "rng": True})
    live = tied().to(torch.bfloat16)
    other = torch.optim.AdamW(live.parameters())
    before = image(live, other)
    with pytest.raises(CheckpointError) as refused:
        load(tmp_path, {"model": live, "optimizer": other, "rng": True})
    assert "model/embedding.weight float32 -> bfloat16: " in refused.value.message
    assert "on_lossy" in refused.value.remedy
    assert image(live, other) == before


def test_a_lossy_load_is_allowed_when_asked_for_and_reported(tmp_path):
    save(tmp_path, 1, {"model": nn.Linear(3, 1)})
    live = nn.Linear(3, 1).to(torch.bfloat16)
    with pytest.warns(LossyLoad, match=r"model/weight float32 -> bfloat16: 3 values change by at most"):
        report = load(tmp_path, {"model": live}, on_lossy="warn").report
    assert report.tensors["model/weight"].change.values_changed == 3
    assert report.tensors["model/weight"].change.max_abs_error > 0
    assert set(load(tmp_path, {"model": live}, on_lossy="allow").report.lossy()) == {"model/weight", "model/bias"}


def test_widening_needs_no_permission(tmp_path):
    model = nn.Linear(3, 1).to(torch.bfloat16)
    save(tmp_path, 1, {"model": model})
    live = nn.Linear(3, 1)
    report = load(tmp_path, {"model": live}).report
    assert torch.equal(live.weight, model.weight.float())
    assert (len(report.converted()), report.lossy()) == (2, {})


STATE = {
    "t": {
        "wide": torch.tensor([0.5, 0.25], dtype=torch.float64),
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "count": torch.tensor([3]),
        "byte": torch.tensor([True]),
    }
}


def test_native_converts_only_what_the_device_does_not_hold(tmp_path):
    save(tmp_path, 1, STATE)
    loaded = load(tmp_path, dtype="native", supported_dtypes=[torch.float32, "float16"])
    dtypes = {name: str(t.dtype).removeprefix("torch.") for name, t in loaded.state["t"].items()}
    assert dtypes == {"wide": "float32", "half": "float16", "count": "int64", "byte": "bool"}
    kept = load(tmp_path, dtype="native").state["t"]
    assert kept["wide"].dtype == torch.float64


def test_without_native_an_unsupported_dtype_is_refused_with_the_remedy(tmp_path):
    save(tmp_path, 1, STATE)
    with pytest.raises(CheckpointError, match="t/wide is float64: the target does not support it") as refused:
        load(tmp_path, supported_dtypes=["float32", "bfloat16"])
    assert refused.value.remedy == 'pass dtype="native" to convert it to float32'


def test_complex_numbers_are_never_halved(tmp_path):
    save(tmp_path, 1, {"t": torch.ones(2, dtype=torch.complex64)})
    with pytest.raises(CheckpointError, match=r"t is complex64: .*no dtype there can represent a complex number"):
        load(tmp_path, dtype="native", supported_dtypes=["float32"])
    with pytest.raises(CheckpointError, match="complex128: XLA silently drops its imaginary part"):
        load(tmp_path, dtype={"complex64": "complex128"}, device="xla")


def test_a_mapping_converts_as_it_says(tmp_path):
    save(tmp_path, 1, STATE)
    loaded = load(tmp_path, dtype={torch.float64: "bfloat16", "int64": torch.int32})
    assert loaded.state["t"]["wide"].dtype == torch.bfloat16
    assert loaded.state["t"]["count"].dtype == torch.int32
    assert set(loaded.report.converted()) == {"t/wide", "t/count"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"dtype": {"float32": "floaty"}}, "dtype names 'floaty'"),
        ({"on_lossy": "maybe"}, "on_lossy is 'maybe'"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(arguments, said, tmp_path):
    save(tmp_path, 1, STATE)
    with pytest.raises(CheckpointError, match=said):
        load(tmp_path, **arguments)

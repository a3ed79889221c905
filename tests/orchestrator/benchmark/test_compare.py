"""Joining what pools measured: ratios with intervals, distances only between outputs of the same computation."""

import pytest

from orchestrator.benchmark.compare import compare, outputs_apart
from orchestrator.benchmark.run import Workload, job_of, targets
from orchestrator.spec import parse_job


def row(case, median_s, low_s, high_s):
    return {
        "case": case,
        "median_s": median_s,
        "ci_low_s": low_s,
        "ci_high_s": high_s,
        "samples_s": [median_s],
        "first_call_s": 1.0,
        "items_per_s": 1 / median_s,
    }


def job(pool, rows, kind="cpu", output=(1.0, -2.0), **result):
    given = {
        "rows": rows,
        "divergence": {"max_abs": 0.0, "max_rel": 0.0, "reference": "cpu float32, this process"},
        "weights_sha256": "w",
        "inputs_sha256": "i",
        "output_sample": list(output),
        "output_shape": [1, 2],
        "kind": kind,
        "emulated": kind.endswith("emulated"),
    }
    return {
        "id": f"{pool}-1",
        "pool": pool,
        "state": "SUCCEEDED",
        "reason": "",
        "failure": None,
        "result": given | result,
    }


def failed(pool, **given):
    return {"id": f"{pool}-1", "pool": pool, "state": "FAILED", "reason": "", "failure": None, "result": None} | given


def test_others_are_compared_with_the_first_pool_that_has_a_result():
    answer = compare(
        [
            failed("gpu", failure={"message": "out of memory"}),
            job("cpu", [row("forward", 0.10, 0.09, 0.11)]),
            job("xla", [row("forward", 0.05, 0.04, 0.06)], "tpu:emulated"),
            job("ipex", [row("forward", 0.10, 0.08, 0.12)], "cpu:ipex"),
            job("slow", [row("forward", 0.30, 0.29, 0.31)]),
        ]
    )
    assert answer["reference_pool"] == "cpu"
    ratios = {r["pool"]: (round(r["speed_ratio"], 2), r["intervals"]) for r in answer["rows"]}
    assert ratios == {
        "cpu": (1.0, "reference"),
        "xla": (2.0, "apart"),
        "ipex": (1.0, "overlap"),
        "slow": (0.33, "apart"),
    }
    xla = answer["rows"][1]
    assert (xla["speed_ratio_low"], xla["speed_ratio_high"]) == pytest.approx((0.09 / 0.06, 0.11 / 0.04))
    assert answer["failed"] == [{"pool": "gpu", "job": "gpu-1", "reason": "out of memory"}]
    assert "one after the other" in answer["note"]


def test_each_case_is_compared_with_the_same_case():
    both = [row("forward", 1.0, 0.9, 1.1), row("training_step", 3.0, 2.9, 3.1)]
    answer = compare(
        [job("a", both), job("b", [row("training_step", 1.5, 1.4, 1.6)]), job("c", [row("other", 1, 1, 1)])]
    )
    assert [(r["pool"], r["case"], r["speed_ratio"]) for r in answer["rows"]] == [
        ("a", "forward", 1.0),
        ("a", "training_step", 1.0),
        ("b", "training_step", 2.0),
        ("c", "other", None),
    ]


def test_nothing_measured_is_an_answer_too():
    answer = compare([failed("a", reason="no device"), failed("b", state="CANCELLED")])
    assert (answer["reference_pool"], answer["rows"], answer["divergence"], answer["note"]) == (None, [], [], "")
    assert [f["reason"] for f in answer["failed"]] == ["no device", "ended as CANCELLED"]


def test_the_distance_between_outputs_is_the_largest_one():
    one, other = job("a", [], output=(1.0, -4.0))["result"], job("b", [], output=(1.5, -4.0))["result"]
    assert outputs_apart(one, other) == {"max_abs": 0.5, "max_rel": 0.125, "reason": ""}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"weights_sha256": "x"}, "not comparable: the weights differ"),
        ({"inputs_sha256": "x"}, "not comparable: the inputs differ"),
        ({"output_shape": [2, 2]}, "not comparable: the output shapes differ"),
        ({"output_sample": ["NaN", 1.0]}, "one output has NaN or infinity where the other has none"),
    ],
)
def test_what_cannot_be_compared_says_why(change, reason):
    one = job("a", [])["result"]
    assert outputs_apart(one | change, one) == {"max_abs": None, "max_rel": None, "reason": reason}


def test_the_same_nan_in_both_outputs_is_no_distance():
    one = job("a", [], output=("NaN", 1.0))["result"]
    assert outputs_apart(one, one)["max_abs"] == 0.0


FLEET = {
    "name": "f",
    "pools": [
        {"pool": "cpu", "kinds": ["cpu"]},
        {"pool": "two", "kinds": ["x:a", "x:b"]},
        {"pool": "off", "kinds": []},
    ],
}


def test_every_kind_of_every_pool_is_a_target():
    assert targets(FLEET, None) == [("cpu", "cpu"), ("two", "x:a"), ("two", "x:b"), ("off", "")]
    assert targets(FLEET, ["two", "cpu"]) == [("two", "x:a"), ("two", "x:b"), ("cpu", "cpu")]


def test_an_unknown_pool_names_the_nearest():
    with pytest.raises(Exception, match="did you mean 'cpu'"):
        targets(FLEET, ["cpuu"])


def test_a_workload_becomes_a_spec_that_is_accepted():
    spec = parse_job(
        job_of(Workload("m.py:make", rounds=5, batch_size=8, train=False, level="O2"), "xla", "tpu:emulated")
    )
    assert (spec.task, spec.batch_size, spec.arguments) == (
        "benchmark",
        8,
        {"rounds": 5, "level": "O2", "train": False},
    )
    (candidate,) = spec.to_job("x", 0.0).candidates
    assert (candidate.kinds, candidate.count, candidate.pool) == (("tpu:emulated",), 1, "xla")

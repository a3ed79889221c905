"""Estimates beside the table of measured rates: of each workload on kinds that others were measured on."""

from orchestrator.core.throughput import Measured
from orchestrator.runtime.benchmarks.throughput import estimates


def rate(items_per_s):
    return Measured(items_per_s, items_per_s, items_per_s, "sample", "r", 1.0)


def test_a_workload_that_was_measured_on_one_kind_is_estimated_on_another_under_both_of_its_names():
    known = {
        (f"w{n}", "train", kind, "fp32"): rate((n + 1) * speed)
        for n in range(4)
        for kind, speed in (("a", 1), ("b", 3))
    }
    known |= {(name, "train", "a", "fp32"): rate(50) for name in ("mine", "folder:1234")}
    known |= {("mine", "forward", "a", "fp32"): rate(70)}
    found = estimates(known)
    assert {key: (round(guess.items_per_s), guess.workloads) for key, guess in found.items()} == {
        ("mine", "train", "b", "fp32"): (150, 4),
        ("folder:1234", "train", "b", "fp32"): (150, 4),
    }


def test_from_few_workloads_nothing_is_estimated():
    known = {(f"w{n}", "train", kind, "fp32"): rate(n + 1) for n in range(2) for kind in "ab"}
    assert estimates({**known, ("mine", "train", "a", "fp32"): rate(50)}) == {}

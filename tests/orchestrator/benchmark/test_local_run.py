"""Back ends of this machine without a fleet: real children, one per column."""

import json

import pytest

from cluster.errors import UserError
from orchestrator.benchmark import local_run
from orchestrator.benchmark.report import sentences
from orchestrator.benchmark.results import summarize
from orchestrator.runtime.benchmarks import throughput

pytestmark = pytest.mark.full


def measure(*names, **asked):
    return local_run.measure({"max_rounds": 9, "case_s": 5} | asked, list(names), lambda line: None)


def test_a_device_of_this_machine_is_measured_by_a_child_of_its_own():
    lines = measure("cpu", cases=["rmsnorm"])
    told = summarize(json.loads(json.dumps(lines)))
    [cell] = told["results"]
    assert (cell["status"], cell["target"], cell["rounds"]) == ("measured", "cpu", 9) and cell["accuracy"]["ok"]
    assert told["targets"][0]["pid"] and told["state"] == "SUCCEEDED"


@pytest.mark.parametrize(
    ("names", "asked", "sentence"),
    [
        (("cpu", "cpu.0"), {}, "names a device twice"),
        (("cpu.x",), {}, "is not a backend"),
        (("cpux",), {"cases": ["rmsnorm"]}, "did you mean 'cpu'"),
        (("cpu",), {"entry": "m.py:make"}, "measured in a fleet's environments"),
        (("cpu",), {"kernels": ["torch", "nunpy"]}, "did you mean 'numpy'"),
    ],
)
def test_what_cannot_be_measured_here_is_said(names, asked, sentence):
    with pytest.raises(UserError) as caught:
        measure(*names, **asked)
    assert sentence in f"{caught.value.message}; {caught.value.remedy}"


def test_kernels_are_arms_of_a_case_and_the_first_is_what_others_are_compared_with():
    asked = {"cases": ["softmax", "mlp/forward/b64-d256"], "kernels": ["torch", "numpy"], "max_rounds": 9}
    lines = measure("cpu", **asked)
    told = summarize(json.loads(json.dumps(lines)))
    assert told["request"]["kernels"] == ["torch", "numpy"]
    first, second, *others = told["results"]
    assert [one["id"] for one in (first, second)] == [f"softmax/256x4096@cpu/fp32/O1/{k}" for k in asked["kernels"]]
    assert (first["kernels"], second["kernels"], first["applied"]) == ("torch", "numpy", ["kernels: torch"])
    assert first["accuracy"]["ok"] and second["accuracy"]["ok"]
    assert "versus" not in first or first["versus"] is None
    assert second["versus"]["reference"] == first["id"] and second["versus"]["ratio"] < 1
    assert {(one["status"], one["reason"].partition(":")[0]) for one in others} == {
        ("unsupported", "kernels do not implement mlp")
    }
    assert "--kernels torch,numpy" in sentences.command(second, told)
    assert "kernels" not in {field for line in measure("cpu", cases=["softmax"]) for field in line}


def test_kernels_never_say_how_fast_a_kind_is_for_placing_jobs():
    assert list(throughput.rows(measure("cpu", cases=["softmax"])))
    assert not list(throughput.rows(measure("cpu", cases=["softmax"], kernels=["torch"])))

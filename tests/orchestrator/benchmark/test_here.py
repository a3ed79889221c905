"""Back ends of this machine without a fleet: real children, one per column."""

import json

import pytest

from cluster.errors import UserError
from orchestrator.benchmark import here
from orchestrator.benchmark.results import results


def measure(*names, **asked):
    return here.measure({"max_rounds": 9, "case_s": 5} | asked, list(names), lambda line: None)


def test_a_device_of_this_machine_is_measured_by_a_child_of_its_own():
    lines = measure("cpu", cases=["rmsnorm"])
    told = results(json.loads(json.dumps(lines)))
    [cell] = told["cells"]
    assert (cell["status"], cell["column"], cell["rounds"]) == ("measured", "cpu", 9) and cell["accuracy"]["ok"]
    assert told["columns"][0]["pid"] and told["state"] == "SUCCEEDED"


@pytest.mark.parametrize(
    ("names", "asked", "sentence"),
    [
        (("cpu", "cpu.0"), {}, "names a device twice"),
        (("cpu.x",), {}, "names no back end"),
        (("cpux",), {"cases": ["rmsnorm"]}, "did you mean 'cpu'"),
        (("cpu",), {"entry": "m.py:make"}, "measured in a fleet's environments"),
    ],
)
def test_what_cannot_be_measured_here_is_said(names, asked, sentence):
    with pytest.raises(UserError) as caught:
        measure(*names, **asked)
    assert sentence in f"{caught.value.message}; {caught.value.remedy}"

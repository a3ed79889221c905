import json
import signal
import sys

import pytest
import torch

from cluster.errors import UserError
from workers.benchmark import measurement
from workers.devices import backends
from workers.measurement.fingerprint import inputs_sha256, weights_sha256
from workers.measurement.statistics import interval
from workers.tasks import benchmark, model_factory
from workers.tasks.context import Context

NAMES = [n for n in backends.available() if n in ("cpu", "tpu")]
SOURCE = """
import torch
from torch import nn

def make_model():
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 300))

def sample_input(batch_size):
    return {"input": torch.rand(batch_size, 6)}
"""


@pytest.fixture(autouse=True)
def short_warm_up(monkeypatch):
    """Two seconds, until a case is steady, are for figures that somebody reads."""
    monkeypatch.setattr(measurement, "MAX_WARMUP_S", 0.05)


@pytest.fixture
def context(tmp_path, monkeypatch):
    (tmp_path / "timed_model.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)

    def make(name="cpu", **given):
        arguments = {"rounds": 7, "warmup": 1} | given.pop("arguments", {})
        return Context(
            backends.create(name), entry="timed_model.py:make_model", arguments=arguments, batch_size=4, **given
        )

    yield make
    sys.modules.pop("timed_model", None)


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_complete_and_checked_against_float64(context, name):
    asked = context(name)
    result = benchmark.main(asked)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert [row["case"] for row in result["rows"]] == ["forward", "training_step"]
    for row in result["rows"]:
        assert (row["status"], row["reason"], len(row["samples_s"])) == ("measured", "", 7)
        assert tuple(row[key] for key in ("median_s", "ci_low_s", "ci_high_s")) == interval(row["samples_s"])
        assert 0 < row["ci_low_s"] <= row["median_s"] <= row["ci_high_s"]
        assert min(row["first_call_s"], row["prepare_s"], row["single_call_s"], *row["samples_s"]) > 0
        assert row["items_per_s"] == 4 / row["median_s"]
        assert row["flops"] == (1 if row["case"] == "forward" else 3) * 2 * 4 * (6 * 16 + 16 * 300)
        assert (row["accuracy"]["ok"], row["accuracy"]["reference"]) == (True, "cpu float64")
        assert 0 < row["accuracy"]["rms_rel"] < 1e-5
        assert "placement" in row["applied"] and "autocast" in row["skipped"]
    assert result["noise"] > 0
    assert result["host"]["class"] in ("quiet", "shared", "unusable")
    assert result["parameters"] == 6 * 16 + 16 + 16 * 300 + 300
    assert (result["precision"], result["level"], result["batch_size"]) == ("float32", "O1", 4)
    assert result["emulated"] is (name == "tpu")
    assert (result["torch"], result["threads"]) == (torch.__version__, torch.get_num_threads())
    assert result["timer"] == "host clock, synchronised"
    assert result["weights_sha256"] == weights_sha256(model_factory.make_model(asked))
    assert result["inputs_sha256"] == inputs_sha256(model_factory.make_sample(asked))


def test_every_counted_round_is_reported_with_the_time_of_each_case(context):
    asked = context(arguments={"warmup": 3, "rounds": 4})
    rows = {row["case"]: row for row in benchmark.main(asked)["rows"]}
    reports = [event for event in asked.events.in_memory if event["type"] == "report"]
    assert [event["step"] for event in reports] == [1, 2, 3, 4]
    for case, row in rows.items():
        assert [event[f"{case}_s"] for event in reports] == row["samples_s"]


def test_the_log_says_what_was_checked_and_what_was_measured(context, capsys):
    row = benchmark.main(context(arguments={"train": False}))["rows"][0]
    ready, measured = capsys.readouterr().out.splitlines()
    assert ready.startswith("forward: prepared in ") and "against float64 on the CPU" in ready
    assert measured.startswith("forward: ") and measured.endswith("items/s, 7 rounds")
    assert f"{row['items_per_s']:,.0f} items/s" in measured


def test_the_user_s_factory_is_called_once(context, tmp_path, capsys):
    (tmp_path / "timed_model.py").write_text(SOURCE.replace("return nn.Seq", "print('made'); return nn.Seq"))
    benchmark.main(context())
    assert capsys.readouterr().out.count("made") == 1


def test_the_same_seed_gives_the_same_weights_and_inputs_and_another_others(context):
    hashes = [
        (weights_sha256(model_factory.make_model(c)), inputs_sha256(model_factory.make_sample(c)))
        for c in (context(seed=1), context(seed=1), context(seed=2))
    ]
    assert hashes[0] == hashes[1]
    assert hashes[0][0] != hashes[2][0]
    assert hashes[0][1] != hashes[2][1]


def test_training_is_left_out_when_not_asked_for(context):
    result = benchmark.main(context(arguments={"train": False}))
    assert [row["case"] for row in result["rows"]] == ["forward"]


def test_one_whose_first_case_is_wrong_and_that_is_asked_to_stop_says_that_it_did_not_finish(context, tmp_path):
    (tmp_path / "timed_model.py").write_text(SOURCE.replace("nn.GELU()", "nn.Threshold(9.0, float('nan'))"))
    asked = context()
    asked.stop.requested = True
    assert [row["status"] for row in benchmark.main(asked)["rows"]] == ["wrong"]
    assert [event["preempted"] for event in asked.events.in_memory] == [True]


@pytest.mark.parametrize("how", ["of the job", "of the arguments"])
def test_a_lower_precision_is_computed_in_it_and_its_errors_show(context, how, needs_native):
    asked = context(precision="bf16") if how == "of the job" else context(arguments={"precision": "bf16"})
    needs_native("bfloat16", asked.backend.BACKEND_NAME)
    result = benchmark.main(asked)
    assert result["precision"] == "bfloat16"
    for row in result["rows"]:
        assert "autocast: bfloat16" in row["applied"]
        assert row["accuracy"]["ok"] is True
        assert 1e-5 < row["accuracy"]["rms_rel"] < 0.05


def test_a_precision_that_is_not_possible_is_refused_with_the_back_end_s_own_remedy(context, needs_native):
    needs_native("float16", context().backend.BACKEND_NAME)
    with pytest.raises(UserError, match=r"training_step: .*loss scaling.*; ") as refused:
        benchmark.main(context(precision="fp16"))
    assert "bf" in refused.value.remedy


def test_a_wrong_result_has_no_time_and_says_why_in_words_that_json_takes(context, tmp_path, capsys):
    source = SOURCE.replace("nn.GELU()", "nn.Threshold(math.inf, math.nan)").replace(
        "import torch\n", "import math\nimport torch\n", 1
    )
    (tmp_path / "timed_model.py").write_text(source)
    asked = context(arguments={"train": False})
    result = benchmark.main(asked)
    assert json.dumps(result, allow_nan=False)
    (row,) = result["rows"]
    assert (row["status"], row["median_s"], row["samples_s"]) == ("wrong", None, [])
    assert "no value is finite" in row["reason"]
    assert result["noise"] is None
    assert asked.events.in_memory == []
    assert "forward: not timed: no value is finite" in capsys.readouterr().out


def test_what_draws_random_numbers_is_measured_and_said_to_be_unchecked(context, tmp_path):
    (tmp_path / "timed_model.py").write_text(SOURCE.replace("nn.GELU()", "nn.GELU(), nn.Dropout(0.5)"))
    forward, train = benchmark.main(context())["rows"]
    assert (forward["accuracy"]["ok"], train["accuracy"]["ok"]) == (True, None)
    assert (train["status"], len(train["samples_s"])) == ("measured", 7)
    assert "draws random numbers" in train["reason"]


def test_what_the_user_s_model_raises_comes_through(context, tmp_path):
    (tmp_path / "timed_model.py").write_text(SOURCE.replace("rand(batch_size, 6)", "rand(batch_size, 7)"))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        benchmark.main(context())


@pytest.mark.parametrize("name", NAMES[-1:])
def test_one_that_is_asked_to_stop_ends_between_two_rounds_with_what_it_has(attempt, name):
    asked = {"rounds": 100_000, "train": False}
    how = {"backend": name, "kind": "tpu:emulated" if name == "tpu" else name, "emulated": name == "tpu"}
    stopped = attempt(task="benchmark", entry="user.py:make_model", arguments=asked, batch_size=4, **how)
    stopped.write(SOURCE)
    ranks = stopped.start()
    try:
        stopped.until_reported(ranks)
        ranks[0].send_signal(signal.SIGTERM)
        (result,) = stopped.finish(ranks)
    finally:
        ranks[0].kill()
    (row,) = result["rows"]
    assert 0 < len(row["samples_s"]) == len(stopped.events("report")) < 100_000
    assert [event["preempted"] for event in stopped.events("note") if "preempted" in event] == [True]


def test_one_that_is_asked_to_stop_before_its_first_round_has_no_times(context):
    asked = context()
    asked.stop.requested = True
    result = benchmark.main(asked)
    (row,) = result["rows"]
    assert (row["case"], row["status"], row["median_s"]) == ("forward", "skipped", None)
    assert [event["preempted"] for event in asked.events.in_memory] == [True]


@pytest.mark.parametrize(
    ("name", "value"), [("rounds", 0), ("warmup", -1), ("rounds", "many"), ("rounds", True), ("train", "no")]
)
def test_arguments_that_make_no_sense_are_refused(context, name, value):
    with pytest.raises(UserError, match=f"{name} is {value!r}"):
        benchmark.main(context(arguments={name: value}))


def test_an_argument_that_nothing_reads_is_refused_with_the_nearest(context):
    with pytest.raises(UserError, match="a benchmark has no argument 'round'; did you mean 'rounds'"):
        benchmark.main(context(arguments={"round": 3}))


def test_a_model_with_nothing_to_train_is_told_to_leave_training_out(context, tmp_path):
    (tmp_path / "timed_model.py").write_text(SOURCE.replace("return nn.Sequential(", "return nn.Flatten() or ("))
    with pytest.raises(UserError, match="no parameter to train; set train: false"):
        benchmark.main(context())


def test_a_benchmark_without_inputs_is_refused_with_the_remedy(context, tmp_path):
    (tmp_path / "timed_model.py").write_text(SOURCE.replace("sample_input", "something"))
    with pytest.raises(
        UserError, match=r"a benchmark needs inputs; add sample_input\(batch_size\) beside timed_model\.py"
    ):
        benchmark.main(context())

import json
import math
import sys

import pytest
import torch

from cluster.errors import UserError
from workers import backends
from workers.optimizers.fingerprint import inputs_sha256, weights_sha256
from workers.tasks import benchmark, models
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
def test_rows_are_complete_and_the_numbers_are_those_of_the_cpu(context, name):
    result = benchmark.main(context(name))
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert [row["case"] for row in result["rows"]] == ["forward", "training_step"]
    for row in result["rows"]:
        assert len(row["samples_s"]) == 7
        assert 0 < row["ci_low_s"] <= row["median_s"] <= row["ci_high_s"]
        assert row["first_call_s"] > 0
        assert row["items_per_s"] == 4 / row["median_s"]
    assert result["divergence"]["max_abs"] < 1e-5
    assert result["divergence"]["max_rel"] < 1e-5
    assert result["divergence"]["reference"] == "cpu float32, this process"
    assert result["prepare_s"] > 0
    assert result["output_shape"] == [4, 300]
    assert len(result["output_sample"]) == 256
    assert result["parameters"] == 6 * 16 + 16 + 16 * 300 + 300
    assert result["emulated"] is (name == "tpu")
    assert result["torch"] == torch.__version__
    assert result["threads"] == torch.get_num_threads()


def test_the_same_seed_gives_the_same_weights_and_inputs_and_another_others(context):
    hashes = [
        (weights_sha256(models.make_model(c)), inputs_sha256(models.make_sample(c)))
        for c in (context(seed=1), context(seed=1), context(seed=2))
    ]
    assert hashes[0] == hashes[1]
    assert hashes[0][0] != hashes[2][0]
    assert hashes[0][1] != hashes[2][1]


def test_training_is_left_out_when_not_asked_for(context):
    result = benchmark.main(context(arguments={"train": False}))
    assert [row["case"] for row in result["rows"]] == ["forward"]


def test_a_lower_precision_shows_as_divergence(context):
    result = benchmark.main(context(precision="bf16"))
    assert "autocast: bfloat16" in result["applied"]
    assert 1e-5 < result["divergence"]["max_rel"] < 0.05


def test_a_model_that_yields_what_is_not_a_number_is_told_in_words_that_json_takes(context, tmp_path):
    source = SOURCE.replace("nn.GELU()", "nn.Threshold(math.inf, math.nan)").replace(
        "import torch\n", "import math\nimport torch\n", 1
    )
    (tmp_path / "timed_model.py").write_text(source)
    result = benchmark.main(context())
    assert json.dumps(result, allow_nan=False)
    assert result["output_sample"][0] == "nan"
    assert result["divergence"]["max_abs"] == 0 or not math.isfinite(float(result["divergence"]["max_abs"]))


@pytest.mark.parametrize(("name", "value"), [("rounds", 0), ("warmup", -1), ("rounds", "many")])
def test_counts_that_make_no_sense_are_refused(context, name, value):
    with pytest.raises(UserError, match=f"{name} is {value!r}"):
        benchmark.main(context(arguments={name: value}))


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

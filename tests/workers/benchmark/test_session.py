"""A session on real back ends: what it opens, times, refuses and survives."""

import itertools
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from patience import LIMIT_S
from torch import nn

from cluster.errors import FleetError, UserError
from workers import kernels as registry
from workers.benchmark import measurement, session_server
from workers.benchmark.cases import catalogue
from workers.benchmark.session import Session, first_dimension
from workers.devices import backends
from workers.devices.backends.dtype_checks import supports_dtype
from workers.measurement.inputs import Sample

pytestmark = pytest.mark.full

NAMES = [name for name in backends.available() if name in ("cpu", "tpu")]
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def short_warm_up(monkeypatch):
    """Two seconds, until a case is steady, are for figures that somebody reads."""
    monkeypatch.setattr(measurement, "MAX_WARMUP_S", 0.05)


@pytest.fixture(params=NAMES)
def session(request):
    with backends.create(request.param) as backend:
        yield Session(backend)


def opened(session, case, **cell):
    told = session.handle(
        {"do": "prepare", "measurement": "a", "case": {"case": case, "precision": "fp32", "level": "O1"} | cell}
    )
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    return told


SMOKE = [case.name for case in catalogue.choose(["smoke", "dlrm"])]


@pytest.mark.parametrize("case", SMOKE)
def test_a_case_is_checked_against_float64_and_timed_in_blocks(session, case):
    told = opened(session, case)
    assert told["accuracy"]["ok"] is True, told
    assert told["first_call_s"] > 0 and told["warmup_calls"] >= 3
    block = session.handle({"do": "run", "measurement": "a"})
    assert (block["calls"], len(block["parts_s"])) == (told["calls_per_part"], told["parts"])
    assert min(block["parts_s"]) > 0 and block["single_call_s"] > 0
    session.handle({"do": "close"})
    with pytest.raises(UserError, match="no measurement 'a' is open"):
        session.handle({"do": "run", "measurement": "a"})


@pytest.mark.parametrize("case", ["rmsnorm/256x4096", "mlp/forward/b64-d256", "mlp/train/b64-d256"])
def test_lower_precision_is_computed_in_it_and_its_errors_show(session, case, needs_native):
    needs_native("bfloat16", session.describe()["device"]["backend"])
    told = opened(session, case, precision="bf16")
    assert told["accuracy"]["ok"] is True and told["accuracy"]["dtype"] == "bfloat16"
    assert told["accuracy"]["rms_rel"] > 1e-4


def test_a_case_is_warmed_up_no_longer_than_it_may_take(session):
    assert opened(session, "rmsnorm/256x4096", case_s=0.0)["warmup_calls"] == 3


def test_cold_goes_over_more_inputs_than_the_cache_holds(monkeypatch):
    with backends.create("cpu") as backend:
        session = Session(backend)
        session._cache_bytes = 40 << 20
        turns, cycle = [], itertools.cycle
        monkeypatch.setattr(measurement.itertools, "cycle", lambda samples: turns.extend(samples) or cycle(samples))
        assert opened(session, "rmsnorm/256x4096", regime="cold")["accuracy"]["ok"]
        places = {sample.args[0].data_ptr() for sample in turns}
        assert len(places) == 31  # three times 40 MiB of 4 MiB each, and the one that comes again
        assert all(torch.equal(sample.args[0], turns[0].args[0]) for sample in turns)
        assert "only hot" in opened(session, "mlp/train/b64-d256", regime="cold")["unsupported"]


def test_training_in_float16_is_unsupported_and_not_replaced(needs_native):
    needs_native("float16")
    with backends.create("cpu") as backend:
        told = opened(Session(backend), "mlp/train/b64-d256", precision="fp16")
        assert "loss scaling" in told["unsupported"]


def test_collectives_run_among_real_ranks():
    code = """
import json
from workers.devices import backends
from workers.benchmark.session import Session
with backends.create("cpu") as backend:
    session = Session(backend)
    for case in ("all-reduce/4MiB-2ranks", "all-gather/4MiB-2ranks"):
        cell = {"case": case, "precision": "fp32", "level": "O1"}
        told = session.handle({"do": "prepare", "measurement": "a", "case": cell})
        block = session.handle({"do": "run", "measurement": "a"})
        session.handle({"do": "close"})
        print(json.dumps([told["accuracy"]["ok"], told["collective"], min(block["parts_s"]) > 0]))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[True, "gloo", True]] * 2, done.stderr[-2000:]


def test_a_user_s_model_is_counted_by_torch_and_its_failures_are_told(session):
    model, sample = nn.Linear(8, 3), Sample((torch.rand(5, 8),), {})
    session._user_build = lambda: (model, sample)
    told = opened(session, "user/mine/train")
    assert (told["accuracy"]["ok"], told["flops"], told["items"]) == (True, 3 * 2 * 5 * 8 * 3, 5)
    session._user_build = lambda: 1 / 0
    assert opened(session, "user/mine/forward") == {"failed": "ZeroDivisionError: division by zero"}
    session._user_build = lambda: (nn.Flatten(), sample)
    assert opened(session, "user/mine/train") == {"unsupported": "the model has no parameter to train"}
    session._user_build = lambda: (model, None)
    assert "add sample_input" in opened(session, "user/mine/forward")["failed"]
    session._user_build = lambda: (nn.Threshold(9.0, float("nan")), sample)
    assert "no value is finite" in opened(session, "user/mine/forward")["accuracy"]["reason"]


def test_what_draws_random_numbers_is_measured_and_said_to_be_unchecked():
    def build():
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2)), Sample((torch.rand(4, 8),), {})

    with backends.create("cpu") as backend:
        session = Session(backend, 0, build)
        forward, train = (opened(session, f"user/m/{mode}") for mode in ("forward", "train"))
        assert forward["accuracy"]["ok"] is True
        assert train["accuracy"]["ok"] is None and "draws random numbers" in train["accuracy"]["reason"]
        assert session.handle({"do": "run", "measurement": "a"})["parts_s"][0] > 0


def test_the_batch_is_the_first_dimension():
    assert first_dimension(Sample((torch.rand(7, 2),), {})) == 7
    assert first_dimension(Sample((), {"x": torch.tensor(1.0)})) == 1


def test_it_is_asked_over_a_socket_until_told_to_end(tmp_path):
    with backends.create("cpu") as backend:
        session, said = Session(backend), []
        served = threading.Thread(
            target=lambda: said.append(session_server.serve(tmp_path, session.handle, lambda: False))
        )
        served.start()
        while not (tmp_path / session_server.ADDRESS).exists():
            served.join(0.01)
        assert session_server.request(tmp_path, {"do": "describe"}, LIMIT_S)["device"]["kind"].startswith("cpu")
        with pytest.raises(UserError, match="unknown request 'rum' to a session; did you mean 'run'"):
            session_server.request(tmp_path, {"do": "rum"}, LIMIT_S)
        session_server.request(tmp_path, {"do": "end"}, LIMIT_S)
        served.join(LIMIT_S)
        assert said == ["ended"]
        with pytest.raises(FleetError, match="does not reply"):
            session_server.request(tmp_path, {"do": "describe"}, 1)


def test_a_call_that_takes_too_long_ends_the_process():
    code = """
import time
from workers.devices import backends
from workers.benchmark.session import Session
session = Session(backends.create("cpu"), 0, lambda: time.sleep(60))
cell = {"case": "user/x/forward", "precision": "fp32", "level": "O1"}
session.handle({"do": "prepare", "measurement": "a", "case": cell, "limit_s": 0.5})
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=LIMIT_S).returncode == 124


@pytest.mark.parametrize(
    "case",
    ["matmul/256x256x256", "rmsnorm/256x4096", "layernorm/256x4096", "softmax/256x4096", "silu/256x4096",
     "swiglu/256x4096", "rope/b1-h8-t512-d64", "attention/prefill-b1-h8-s256-d64", "attention/decode-b4-h8-s1024-d64",
     "matmul-vec/2048x2048", "weighted-sum/2048x2048", "attention-scores/b4-h8-t1-s1024-d64"],
)  # fmt: skip
def test_an_operation_by_kernels_is_held_to_the_same_reference(case):
    with backends.create("cpu") as backend:
        session = Session(backend)
        plain, told = (opened(session, case, **given) for given in ({}, {"kernels": "numpy"}))
        assert told["accuracy"]["ok"] is True and told["applied"] == ["kernels: numpy"]
        assert told["inputs_sha256"] == plain["inputs_sha256"]
        assert told["timer"] == "host clock, synchronised"
        assert session.handle({"do": "run", "measurement": "a"})["single_call_s"] > 0


@pytest.mark.parametrize("case", catalogue.choose(["backward"]), ids=lambda case: case.name)
def test_gradients_of_an_operation_are_measured_without_its_forward(case, absent):
    if reason := registry.unavailable_reason("cpu"):
        absent("compiler", reason)
    with backends.create("cpu") as backend:
        session = Session(backend)
        for precision in ("bf16", "fp32"):
            plain, told = (opened(session, case.name, precision=precision, **g) for g in ({}, {"kernels": "cpu"}))
            if precision == "bf16" and not supports_dtype(backend, torch.bfloat16):
                assert plain["unsupported"] == told["unsupported"] == "cpu has no native bfloat16"
                continue
            assert plain["accuracy"]["ok"] is True
            if case.definition.name == "attention":
                assert "have no kernel of their own for the gradients of attention" in told["unsupported"]
            else:
                assert told["accuracy"]["ok"] is True and told["inputs_sha256"] == plain["inputs_sha256"]
        assert session.handle({"do": "run", "measurement": "a"})["single_call_s"] > 0
        assert "O2 compiles the model" in opened(session, case.name, level="O2")["unsupported"]


def test_cold_caches_and_bfloat16_are_measured_by_kernels_too():
    with backends.create("cpu") as backend:
        told = opened(Session(backend), "softmax/256x4096", kernels="numpy", regime="cold", precision="fp32")
        assert told["accuracy"]["ok"] is True


@pytest.mark.parametrize(
    ("cell", "told"),
    [
        ({"case": "embedding/v32000-c512-t2048", "kernels": "torch"}, "kernels do not implement embedding"),
        ({"case": "mlp/train/b64-d256", "kernels": "torch"}, "kernels do not implement mlp"),
        ({"case": "softmax/256x4096", "kernels": "torch", "level": "O2"}, "measured at O0 and O1 only"),
        ({"case": "softmax/256x4096", "kernels": "nunpy"}, "unknown kernels 'nunpy'"),
    ],
    ids=["no operation", "a model", "compiled", "unknown"],
)
def test_what_kernels_do_not_have_is_unsupported_with_its_reason(cell, told):
    with backends.create("cpu") as backend:
        answer = Session(backend).handle(
            {"do": "prepare", "measurement": "a", "case": {"precision": "fp32", "level": "O1"} | cell}
        )
    assert told in answer["unsupported"]

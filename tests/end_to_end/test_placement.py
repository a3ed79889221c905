"""What was measured decides: the same job, before and after a benchmark run on a mixed cluster."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.environments import environments
from cluster.errors import NotFound
from orchestrator import Orchestrator, RunJob, TrainJob

pytestmark = pytest.mark.full

MODEL = """
import time
import torch

def make():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))

class Reads(torch.nn.Module):
    def forward(self, x):
        for _ in range(30):  # each wants a number at once: lazy tensors run a program for it, a CPU has it
            x = x * (1.0 if x.detach().sum().item() > -1e9 else 2.0)
        return x

def make_slow_on_xla():
    return torch.nn.Sequential(Reads(), make())

def sample_input(batch_size):
    return torch.rand(batch_size, 64)

def missing_weights():
    raise KeyError("weights")

def train(ctx):
    return {"kind": ctx.kind}

def slowly(ctx):
    model = make()
    restored = ctx.checkpoint.restore({"model": model})
    if restored:
        return {"kind": ctx.kind, "from": restored.step}
    for step in range(1, 5001):
        time.sleep(0.1)
        ctx.report(step=step, of=5000)
        if step == 1 or ctx.preempted:
            ctx.checkpoint.save(step, {"model": model})
        if ctx.preempted:
            return {}
"""
FLEET = """
name: mixed
scheduler: {policy: finish_time, every_s: 2}
pools:
  cpu: {backend: cpu}
  xla: {backend: tpu, environment: xla, env: {PJRT_DEVICE: CPU}}
"""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Orchestrator]:
    """A fleet of its own, of a CPU pool and an XLA pool."""
    try:
        environments.path("xla")
    except NotFound:
        pytest.skip("the environment xla is not made here")
    home = tmp_path_factory.mktemp("mixed")
    (home / "fleet.yaml").write_text(FLEET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYFLEET_HOME", str(home))
        o = Orchestrator.up(home / "fleet.yaml")
        yield o
        o.down()


def test_the_same_job_lands_where_its_folder_was_measured_faster_and_moves_there(
    mixed: Orchestrator, tmp_path: Path, until: Callable[..., Any]
):
    (tmp_path / "m.py").write_text(MODEL)
    wanted = {"any_of": [{"pool": "xla"}, {"pool": "cpu"}]}
    job = TrainJob(entry="m.py", working_dir=str(tmp_path), resources=wanted, objective="throughput")
    before = mixed.submit(job)
    assert before.result()["returned"] == {"kind": "tpu:emulated"}
    assert "throughput of this job is unmeasured" in json.dumps(before.history())
    measured = mixed.benchmarks.run(
        entry="m.py:make_slow_on_xla", working_dir=str(tmp_path), batch_size=32, max_rounds=9, case_s=0.3
    )
    rate = {c["target"]: c["items_per_s"] for c in measured["results"] if c["mode"] == "train"}
    assert rate["cpu"] > rate["tpu:emulated"]
    after = mixed.submit(job)
    assert after.result()["returned"] == {"kind": "cpu"}
    [placed] = [e for e in after.history() if e["event"] == "placed"]
    assert f"in {measured['run']}" in placed["data"]["reason"] and "samples/s" in placed["data"]["reason"]
    until(lambda: mixed.jobs.offers(job)["offers"][0]["pool"] == "cpu")  # the device of the job that ended is free
    [first, *_] = mixed.jobs.offers(job)["offers"]
    assert (first["chosen"], first["wait"]) == (True, "now")
    assert first["items_per_s"] == first["rate"]["per_s"] == pytest.approx(rate["cpu"])
    told = json.dumps(mixed.jobs.explain(after.id))
    assert told.count("measured") >= 2 and "unmeasured" not in told
    it_moves_there_once_that_pays(mixed, job, tmp_path / "may-end", until)


def it_moves_there_once_that_pays(mixed: Orchestrator, job: TrainJob, may_end: Path, until: Callable[..., Any]):
    holds = mixed.submit(RunJob(command=f"until [ -e {may_end} ]; do sleep 0.1; done", resources={"pool": "cpu"}))
    until(lambda: holds.state == "RUNNING")
    moves = mixed.submit(job.model_copy(update={"entry": "m.py:slowly", "objective": "any"}))
    until(lambda: moves.reports())
    may_end.touch()
    ended = moves.result()["returned"]
    assert ended["kind"] == "cpu" and ended["from"] > 1
    [why] = [event["data"]["reason"] for event in moves.history() if event["event"] == "preempted"]
    assert why.startswith("moves to 1 cpu in pool cpu: about ") and "and the move costs about " in why


def test_a_configuration_of_transformers_is_measured_where_the_library_is(mixed: Orchestrator, tmp_path: Path, cli):
    small = {"model_type": "bert", "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2,
             "num_attention_heads": 2, "intermediate_size": 64}  # fmt: skip
    (tmp_path / "small.json").write_text(json.dumps(small))
    words = ("benchmark", "run", "transformers:small.json", "--working-dir", str(tmp_path), "--max-rounds", "3")
    done = cli(*words, "--case-seconds", "0.1", "--batch-size", "2", "--no-train", "-o", "json")
    assert done.returncode == 0, done.stderr
    told = {cell["kind"]: cell for cell in json.loads(done.stdout)["results"]}
    assert told["cpu"]["status"] == "measured" and told["cpu"]["accuracy"]["ok"] and told["cpu"]["items"] == 2
    assert told["tpu:emulated"]["status"] == "unsupported"
    assert told["tpu:emulated"]["reason"] == "transformers is not installed in this environment"
    absent = cli(*(word.replace("small.json", "smal.json") for word in words))
    assert (absent.returncode, "did you mean 'small.json'" in absent.stderr) == (2, True), absent


def test_two_back_ends_compute_alike_and_where_they_do_not_is_named(mixed: Orchestrator, tmp_path: Path, cli):
    (tmp_path / "m.py").write_text(MODEL)
    words = ("validate", "m.py:make", "--working-dir", str(tmp_path), "--batch-size", "8", "-o", "json")
    done = cli(*words, "--on", "cpu,xla")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["same"] and [t["kind"] for t in told["targets"]] == ["cpu", "tpu:emulated"]
    assert len(told["compared"][0]["layers"]) == 4 and len(told["compared"][0]["steps"]) == 4
    parted = cli(*words, "--on", "cpu,tpu:emulated", "--rtol", "1e-12")
    # On some CPUs every layer is equal bit for bit, and a step of training is the first that parts.
    assert parted.returncode == 1 and any(json.loads(parted.stdout)["compared"][0]["first"].values())
    for on, sentence in (
        ("cpu,cpu", "are both cpu with torch"),
        ("cpu", "a comparison needs two targets"),
        ("cpu,tpu:v5e", "'tpu:v5e' is neither a pool nor a kind in this fleet"),
    ):
        refused = cli(*words, "--on", on)
        assert (refused.returncode, sentence in refused.stderr) == (2, True), refused
    failing = cli("validate", "m.py:missing_weights", *words[2:], "--on", "cpu,xla")
    assert (failing.returncode, "no result on cpu: KeyError: 'weights'" in failing.stderr) == (2, True), failing
    assert "Traceback" not in failing.stderr


SCRIPT = """
import os, pathlib, time
import torch

out = pathlib.Path(os.environ["POLYFLEET_OUTPUT_DIR"])
kept = out / "ckpt.pt"
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
kinds = []
if kept.exists():
    saved = torch.load(kept, map_location="cpu")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    kinds = saved["kinds"]
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
kinds.append(os.environ["POLYFLEET_DEVICE_KIND"])
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": len(kinds), "kinds": kinds}
torch.save(state, out / "new.pt")
(out / "new.pt").replace(kept)
while len(kinds) == 1:
    time.sleep(0.1)
"""


def test_a_script_s_files_go_with_it_to_another_vendor_and_come_home(mixed: Orchestrator, tmp_path: Path, cli, until):
    """Plain torch code that knows nothing of us; its file is imported where it is, and from here."""
    (tmp_path / "script.py").write_text(SCRIPT)
    spec = {"command": "python script.py", "working_dir": str(tmp_path), "recovery": {"grace": "1s"}}
    job = mixed.submit(RunJob(**spec, resources={"pool": "cpu"}))
    until(lambda: any(entry["path"] == "ckpt.pt" for entry in job.files()["entries"]))
    mixed.jobs.migrate(job.id, "xla")
    assert job.wait().state == "SUCCEEDED"
    assert [(f["pool"], f["attempt"]) for f in job.files()["folders"]] == [("xla", 2)]
    home = tmp_path / "home"
    told = cli("files", "get", job.id, str(home), "-o", "json")
    assert told.returncode == 0 and json.loads(told.stdout)["files"] == ["ckpt.pt"], told
    for source, target in ((str(home / "ckpt.pt"), "cpu:from-here"), (f"xla:{job.id}/output-2/ckpt.pt", "xla:there")):
        done = cli("checkpoint", "import", source, target, "-o", "json")
        assert done.returncode == 0, done
        shown = json.loads(cli("checkpoint", "show", target, "-o", "json").stdout)
        assert shown["step"] == 2 and {"model", "optimizer"} <= set(shown["entries"])
    brought = cli("checkpoint", "copy", "cpu:from-here", str(home / "steps"), "-o", "json")
    assert brought.returncode == 0 and cli("checkpoint", "verify", str(home / "steps")).returncode == 0, brought

"""The main job, end to end, on a mixed fleet of this machine: `make demo`.

Trains a small network on handwritten digits in the `cpu` pool, moves its checkpoint to the `xla` pool, goes on there,
kills a running attempt and lets it recover in a pool of another back end, compares all pools, and writes what happened
to demo-report/summary.json (its keys are explained in docs/guides/demo.md).
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from cluster.errors import PolyfleetError

HERE = Path(__file__).parent
STEPS, HALFWAY, ACCURACY = 300, 150, 0.97

console = Console(width=None if sys.stdout.isatty() else 165, highlight=False)
summary: dict[str, Any] = {"seconds": {}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, default=Path("demo-report"), help="folder for summary.json")
    parser.add_argument("--case-seconds", type=float, default=10.0, help="how long the pools are compared, per case")
    arguments = parser.parse_args()
    report, case_s = arguments.report, arguments.case_seconds
    report.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with own_home(), tempfile.TemporaryDirectory(prefix="digits-") as folder:
        shutil.copytree(HERE / "digits", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        sys.path.insert(0, folder)
        import prepare_data

        prepare_data.main(Path(folder))
        try:
            run(folder, case_s)
        except PolyfleetError as e:
            console.print(f"[red]error:[/] {e.message}\n  {e.remedy}")
            return 1
    summary["seconds"]["total"] = round(time.monotonic() - started, 1)
    (report / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    console.print(f"\n[bold]{summary['seconds']['total']:.0f} s in all[/]; {report / 'summary.json'} has the numbers")
    return verdict()


@contextmanager
def own_home() -> Iterator[None]:
    """A home of the demo's own, so that a fleet you have up is left alone; nothing of it stays."""
    home = tempfile.mkdtemp(prefix="polyfleet-demo-")
    os.environ["POLYFLEET_HOME"] = home
    try:
        yield
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def step(name: str, title: str) -> Iterator[None]:
    console.rule(f"[bold]{title}", align="left")
    started = time.monotonic()
    yield
    summary["seconds"][name] = round(time.monotonic() - started, 1)
    console.print(f"[dim]{summary['seconds'][name]:.1f} s[/]")


def say(line: str) -> None:
    console.print(f"[dim]{line}[/]")


def run(folder: str, case_s: float) -> None:
    from orchestrator import Orchestrator

    with step("up", "1. A mixed fleet on this machine"):
        o = Orchestrator.up(demo=True, progress=say)
    try:
        with step("inventory", "2. What the fleet has"):
            inventory(o)
        second = next((p for p in ("xla", "ipex") if p in summary["pools"]), "cpu")
        with step("train", "3. Train on cpu: once to the end as the reference, once halfway"):
            reference = train(o, folder, "reference", "cpu", STEPS)
            first_half = train(o, folder, "digits", "cpu", HALFWAY)
        with step("move", f"4. Move the checkpoint to {second} and go on there"):
            move_and_resume(o, folder, first_half, reference, second)
        with step("recover", "5. Kill a running attempt: it recovers in a pool of another back end"):
            recover(o, folder, second)
        with step("benchmark", "6. Compare the pools"):
            benchmark(o, folder, case_s)
        summary["jobs"] = [
            {k: job[k] for k in ("id", "task", "state", "kind", "pool", "attempt")} for job in o.jobs.list()
        ]
        console.print(o.jobs.list())
    finally:
        with step("down", "7. Take it down: nothing of it stays"):
            o.down(say)


def inventory(o: Any) -> None:
    fleet, nodes = o.fleet.show(), o.inventory()
    console.print(fleet)
    console.print(nodes)
    summary["pools"] = [pool["pool"] for pool in fleet["pools"]]
    summary["skipped_pools"] = fleet["skipped_pools"]
    summary["devices"] = [
        {"node": n["node"], "pool": n["pool"], "torch": n["versions"].get("torch"),
         **{k: d[k] for k in ("kind", "name", "emulated", "total_memory_bytes")}}
        for n in nodes for d in n["devices"]
    ]  # fmt: skip


def job_spec(folder: str, name: str, steps: int, **more: Any) -> dict[str, Any]:
    arguments = {"steps": steps, "save_every": 50} | more.pop("arguments", {})
    return {"name": name, "task": "train", "entry": "train.py", "working_dir": folder, "arguments": arguments, **more}


def train(o: Any, folder: str, name: str, pool: str, steps: int, **more: Any) -> Any:
    """Submit, show the loss while it falls, and return the finished job."""
    job = o.submit(job_spec(folder, name, steps, resources={"pool": pool, "accelerators": kind_of(o, pool)}, **more))
    result = job.result()
    told = job.view
    console.print(f"{job.id}: {told['state']} on {told['kind']}, {curve(job)}, {describe(result)}")
    return job


def kind_of(o: Any, pool: str) -> str:
    return next(p["kinds"][0] for p in o.fleet.show()["pools"] if p["pool"] == pool)


def losses(job: Any) -> dict[int, float]:
    return {r["step"]: r["metrics"]["loss"] for r in job.reports() if "loss" in r["metrics"]}


def curve(job: Any) -> str:
    by_step = losses(job)
    first, last = min(by_step), max(by_step)
    return f"loss {by_step[first]:.4f} at step {first} → {by_step[last]:.4f} at step {last}"


def describe(result: dict[str, Any]) -> str:
    accuracy = (result.get("returned") or {}).get("accuracy")
    return f"accuracy {accuracy:.2%}" if accuracy is not None else "stopped"


def move_and_resume(o: Any, folder: str, first_half: Any, reference: Any, pool: str) -> None:
    at = first_half.view["checkpoint"]
    copied = o.checkpoints.copy(f"cpu:{at['path']}", f"{pool}:moved")
    console.print(copied)
    job = train(o, folder, "digits-moved", pool, STEPS, checkpoint={"resume_from": copied["target"]})
    here, there = losses(reference), losses(job)
    next_step = at["step"] + 1
    summary["losses"] = {
        "reference": {str(s): here[s] for s in (1, HALFWAY, next_step, STEPS)},
        "moved": {str(s): there[s] for s in (next_step, STEPS)},
    }
    summary["resume_step"] = job.view["resumed_step"]
    summary["loss_difference"] = abs(here[next_step] - there[next_step])
    summary["accuracy"] = job.result()["returned"]["accuracy"]
    summary["checkpoint_copy"] = {k: copied[k] for k in ("source", "target", "step", "files", "bytes", "verified")}
    console.print(
        f"step {next_step}: loss {there[next_step]:.6f} on {pool}, {here[next_step]:.6f} uninterrupted on cpu, "
        f"difference [bold]{summary['loss_difference']:.1e}[/]"
    )


def recover(o: Any, folder: str, pool: str) -> None:
    """Start on `pool`, with the cpu pool as the next candidate; kill -9 its rank after the first checkpoint."""
    candidates = [{"pool": p, "accelerators": kind_of(o, p)} for p in (pool, "cpu")]
    slow = {"min_step_s": 0.03}
    job = o.submit(job_spec(folder, "digits-killed", STEPS, arguments=slow, resources={"ordered": candidates}))
    wait_for(lambda: job.view["checkpoint"] is not None or job.state in ("SUCCEEDED", "FAILED"))
    victim = rank_of(job.id)
    say(f"kill -9 {victim.pid}, a rank of {job.id} on {job.view['kind']} at step {job.view['metrics'].get('step')}")
    victim.kill()
    result = job.result()
    told = job.view
    for attempt in told["attempts"]:
        console.print(
            f"  attempt {attempt['attempt']} on {attempt['kind']}: {attempt['outcome']} ({attempt['reason']})"
        )
    console.print(f"{job.id}: {told['state']}, resumed at step {told['resumed_step']}, {describe(result)}")
    summary["recovered"] = {
        "state": told["state"],
        "kinds": [attempt["kind"] for attempt in told["attempts"]],
        "resumed_step": told["resumed_step"],
        "accuracy": result["returned"]["accuracy"],
    }


def rank_of(job_id: str) -> psutil.Process:
    for process in psutil.process_iter(["cmdline"]):
        try:
            is_rank = "workers.tasks.rank_main" in (process.info["cmdline"] or ())
            if is_rank and process.environ()["POLYFLEET_JOB"] == job_id:
                return process
        except (psutil.Error, KeyError):
            continue
    raise SystemExit(f"no rank of {job_id} runs here")


def wait_for(true: Any, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline:
            raise SystemExit("the demo waited in vain")
        time.sleep(0.05)


def benchmark(o: Any, folder: str, case_s: float) -> None:
    compared = o.benchmarks.run(
        entry="model.py:make_model",
        sample_input="model.py:sample_input",
        working_dir=folder,
        batch_size=64,
        pools=[pool["pool"] for pool in o.fleet.show()["pools"]],
        case_s=case_s,
        progress=say,
    )
    console.print(compared)
    told = (
        "target",
        "pool",
        "kind",
        "case",
        "status",
        "reason",
        "call_s",
        "items_per_s",
        "versus",
        "noise",
        "accuracy",
    )
    summary["benchmark"] = {
        "results": [{name: cell.get(name) for name in told} for cell in compared["results"]],
        "hosts": compared["hosts"],
        "failed": [cell["id"] for cell in compared["results"] if cell["status"] != "measured"] + list(compared["lost"]),
    }


def verdict() -> int:
    """0 when everything the demo promises came true."""
    wrong = [
        message
        for wrong, message in (
            (summary["accuracy"] < ACCURACY, f"accuracy {summary['accuracy']:.2%} is below {ACCURACY:.0%}"),
            (summary["resume_step"] != HALFWAY, f"resumed at step {summary['resume_step']}, not {HALFWAY}"),
            (summary["recovered"]["state"] != "SUCCEEDED", "the killed job did not recover"),
            (bool(summary["benchmark"]["failed"]), f"not measured: {summary['benchmark']['failed']}"),
        )
        if wrong
    ]
    for message in wrong:
        console.print(f"[red]{message}[/]")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

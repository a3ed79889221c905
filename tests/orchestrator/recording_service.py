"""A service in memory for tests of the HTTP layer: it records what it is asked and answers from what it was given.

Run as a script it serves itself as a real server process: `python recording_service.py --home H --port 0`.
"""

import argparse
import threading
from pathlib import Path

from cluster.errors import FleetError, NotFound, SpecError
from workers.messages import PROTOCOL

NOW = "2026-11-20T23:14:53Z"
KINDS = {"cpu": "cpu", "xla": "tpu:emulated"}


def job_view(job_id, name, task="run", state="SUCCEEDED", **given):
    view = {
        "id": job_id,
        "name": name,
        "task": task,
        "state": state,
        "reason": "",
        "priority": 0,
        "kind": "cpu",
        "pool": "cpu",
        "nodes": ["cpu-0"],
        "epoch": 1,
        "candidate": 0,
        "submitted_at": NOW,
        "started_at": NOW,
        "ended_at": NOW,
        "restarts": 0,
        "interruptions": 0,
        "resumed_step": None,
        "checkpoint": None,
        "metrics": {},
        "result": None,
        "failure": None,
        "attempts": [
            {
                "epoch": 1,
                "candidate": 0,
                "kind": "cpu",
                "pool": "cpu",
                "leases": [["cpu-0/cpu", [0]]],
                "placed_at": NOW,
                "started_at": NOW,
                "ended_at": NOW,
                "outcome": "succeeded",
                "reason": "",
            }
        ],
    }
    return view | given


def node(pool, kind):
    device = {
        "backend": kind.partition(":")[0],
        "kind": kind,
        "index": 0,
        "name": f"device of {pool}",
        "uuid": "",
        "driver_version": "",
        "total_memory_bytes": 8 << 30,
        "free_memory_bytes": 4 << 30,
        "architecture": "",
        "emulated": kind.endswith(":emulated"),
        "unavailable_reason": "",
        "properties": {},
        "leased_by": "",
    }
    return {
        "node": f"{pool}-0",
        "ray_node_id": "f" * 8,
        "host": "here",
        "address": "127.0.0.1",
        "pool": pool,
        "state": "ready",
        "backend": device["backend"],
        "environment": "main",
        "protocol": PROTOCOL,
        "versions": {"torch": "2.13.0"},
        "devices": [device],
        "cpu_count": 2,
        "memory_total_bytes": 1 << 33,
        "memory_free_bytes": 1 << 32,
        "load_1min": 0.1,
        "disk_free_bytes": 1 << 40,
        "agent_pid": 1,
        "storage": "/s",
        "findings": [],
    }


class RecordingService:
    def __init__(self, home=None):
        self.home = home
        self.calls = []
        self.packages = {}
        self.views = {}
        self.runs = {}
        self.lines = {}
        self.keys = {}
        self.found = []
        self.running = threading.Event()
        self.release = threading.Event()
        self.closed = False

    def _note(self, name, *arguments):
        self.calls.append((name, *arguments))

    def submit(self, spec, package, key):
        self._note("submit", spec, package, key)
        if "broken" in spec:
            raise KeyError("broken")
        if spec.get("resources", {}).get("accelerators") == "tpu:v5p":
            raise SpecError("resources.accelerators", "no pool has tpu:v5p", "kinds here: cpu")
        if key in self.keys:
            return self.views[self.keys[key]]
        name = spec.get("name") or "job"
        job_id = f"{name}-{len(self.views):06x}"
        state = {"fail": "FAILED", "stop": "CANCELLED"}.get(name, "SUCCEEDED")
        pool = spec.get("resources", {}).get("pool") or "cpu"
        given = {"pool": pool, "kind": KINDS.get(pool, "cpu")}
        if state == "FAILED":
            given["failure"] = {
                "rank": 0,
                "node": "cpu-0",
                "kind": "user",
                "message": "ValueError: no",
                "traceback": "T",
                "exit_code": 1,
            }
        self.views[job_id] = job_view(job_id, name, spec["task"], state, **given)
        self.lines.setdefault(job_id, [f"hello from {name}"])
        self.keys[key] = job_id
        return self.views[job_id]

    def plan(self, spec):
        self._note("plan", spec)
        candidate = {
            "candidate": 0,
            "kinds": ["cpu"],
            "count": 1,
            "nodes": 1,
            "fits": ["cpu-0/cpu"],
            "refused": {"xla-0/tpu:emulated": "is tpu:emulated, job accepts cpu"},
        }
        return {"candidates": [candidate], "would_start": {"candidate": 0, "leases": [["cpu-0/cpu", [0]]]}}

    def jobs(self, states, limit):
        self._note("jobs", states, limit)
        return [view for view in reversed(self.views.values()) if not states or view["state"] in states][:limit]

    def job(self, ref):
        self._note("job", ref)
        found = [view for view in self.views.values() if view["id"].startswith(ref) or view["name"] == ref]
        if not found:
            raise NotFound(f"no job {ref!r}", "`polyfleet jobs` lists them")
        return found[-1]

    def cancel(self, ref):
        view = self.job(ref)
        view["state"] = "CANCELLED"
        return view

    def explain(self, ref):
        return self.plan({}) | {"state": self.job(ref)["state"], "reason": ""}

    def history(self, ref):
        return [{"seq": 1, "time": NOW, "job": self.job(ref)["id"], "event": "submitted", "state": "PENDING"}]

    def reports(self, ref, after):
        self.job(ref)
        return [{"number": 1, "step": 1, "loss": float("nan")}][after:]

    def logs(self, ref, rank, epoch, cursor, limit_bytes):
        self._note("logs", ref, rank, epoch, dict(cursor), limit_bytes)
        view = self.job(ref)
        done = cursor.get("1.0", 0)
        lines = self.lines.get(view["id"], [])[done : done + 2]
        shown = [{"time": NOW, "epoch": 1, "rank": 0, "stream": "out", "text": text} for text in lines]
        end = done + len(lines) >= len(self.lines.get(view["id"], []))
        return {"lines": shown, "cursor": {"1.0": done + len(lines)}, "ended": end and view["state"] != "RUNNING"}

    def logs_tail(self, ref, rank, epoch, count):
        self._note("logs_tail", ref, rank, epoch, count)
        view = self.job(ref)
        lines = self.lines.get(view["id"], [])
        last = lines[max(len(lines) - count, 0) :]
        shown = [{"time": NOW, "epoch": 1, "rank": 0, "stream": "out", "text": text} for text in last]
        return {"lines": shown, "cursor": {"1.0": len(lines)}, "ended": view["state"] != "RUNNING"}

    def changes(self, after, timeout_s):
        self._note("changes", after, timeout_s)
        if after == 0:
            return {
                "events": [{"seq": 1, "time": NOW, "job": "a", "event": "submitted", "state": "PENDING"}],
                "last": 1,
            }
        self.release.wait(min(timeout_s, 0.2))
        return {"events": [], "last": after}

    def nodes(self):
        return [node("cpu", "cpu"), node("xla", "tpu:emulated")]

    def fleet(self):
        pools = [
            {
                "pool": p,
                "backend": k.partition(":")[0],
                "environment": "main",
                "kinds": [k],
                "nodes": 1,
                "devices": 1,
                "free": 1,
                "price_per_hour": 0.0,
            }
            for p, k in KINDS.items()
        ]
        return {"name": "local", "address": "127.0.0.1:1", "state": "up", "pools": pools}

    def doctor(self):
        return self.found

    def health(self):
        return {"controller": {"turn_age_s": 0.1, "doing": "waiting for messages"}, "findings": self.found}

    def store_package(self, sha, data_path):
        self._note("store_package", sha)
        self.packages[sha] = data_path.read_bytes()

    def has_package(self, sha):
        return sha in self.packages

    def checkpoints(self, pool, prefix):
        path = f"{prefix}digits/step-1"
        return [
            {"pool": pool or "cpu", "path": path, "step": 1, "bytes": 10, "producer": {"kind": "cpu"}, "created": NOW}
        ]

    def checkpoint_show(self, ref):
        if not ref.startswith("cpu:"):
            raise NotFound(f"no checkpoint at {ref}", "none")
        return {
            "pool": "cpu", "path": "a", "name": "a", "step": 1, "created": NOW, "bytes": 9 << 20, "files": 1,
            "producer": {"polyfleet": "0.1.0", "torch": "2.13.0", "backend": "cpu", "kind": "cpu", "job": "a-1"},
            "entries": {"model": {"kind": "module", "type": "Net"}, "random": {"kind": "tree", "type": ""}},
            "tensors": 3, "parameters": 1200, "roles": {"parameter": 2, "tensor": 1}, "ties": {},
            "dtypes": {"float32": {"tensors": 2, "bytes": 8 << 20}, "uint8": {"tensors": 1, "bytes": 1 << 20}},
        }  # fmt: skip

    def checkpoint_plan(self, ref, to_kind, count):
        line = {"dtype": "float64", "tensors": 2, "bytes": 8 << 20, "action": "convert", "to": "float32"}
        return {
            "step": 1,
            "source": {"backend": "cpu", "kind": "cpu", "world": 1},
            "target": {"backend": to_kind.partition(":")[0], "kind": to_kind, "count": count},
            "bytes": 9 << 20,
            "ok": True,
            "dtypes": [line | {"may_lose": True, "reason": "tpu has no float64", "example": "model/weight"}],
            "random": {"python": "continued", "xla": "derived: saved on cpu"},
            "memory": {"needed_bytes": 4 << 20, "device_bytes": 16 << 30, "fits": "replicated"},
            "reshard": {"from": 1, "mesh": [], "to": count, "tensors_cut": 0},
            "read": {"sample_bytes": 9 << 20, "bytes_per_s": 1e9, "estimated_s": 0.01},
            "cannot_follow": ["random numbers of xla: derived: saved on cpu"],
        }

    def checkpoint_verify(self, ref):
        pool, _, path = ref.partition(":")
        return {"pool": pool, "path": path, "step": 1, "ok": True, "bytes": 9 << 20, "chunks": 3, "problems": []}

    def checkpoint_copy(self, order, progress):
        source, target = order["source"], order["target"]
        self._note("checkpoint_copy", source, target, order["to_kind"])
        if target.startswith("full:"):
            raise FleetError("no space left in pool full", "make room")
        progress(5, 10)
        self.running.set()
        while target.startswith("slow:") and not self.release.wait(0.02):
            progress(5, 10)
        progress(10, 10)
        report = {"source": source, "target": target, "step": 1, "files": 2, "bytes": 10, "seconds": 0.25}
        return report | {"already_there": False, "verified": True, "travelled_bytes": 8}

    def checkpoint_tool(self, verb, arguments, progress):
        self._note("checkpoint_tool", verb, arguments)
        progress(10, 10)
        if verb == "verify":
            return self.checkpoint_verify(arguments["place"])
        if verb == "pin":
            return {"path": arguments["path"], "pinned": not arguments.get("remove", False)}
        if verb == "prune":
            told = {"root": arguments["root"], "kept": ["b"], "deleted": ["a"], "bytes": 10}
            return told | {"dry_run": arguments["dry_run"]}
        if verb == "diff":
            row = {"name": "model/w", "dtype": "float32", "shape": [2], "changed": 1, "max_abs": 0.5, "max_rel": 0.1}
            told = {"a": "a", "b": "b", "same": False, "equal": 3, "tensors": [row | {"max_ulp": 7}]}
            return told | {"only_in_a": ["model/x"], "only_in_b": [], "entries": []}
        raise NotFound(f"no tool {verb}", "none")

    def benchmark_begin(self, request, package):
        self._note("benchmark_begin", request, package)
        run = f"bench-{len(self.runs):06x}"
        self.runs[run] = [line | {"seq": n, "time": 0.0} for n, line in enumerate(benchmark_lines(run, request), 1)]
        return self.benchmark(run)

    def benchmarks(self):
        return [self.benchmark(run) for run in self.runs]

    def benchmark(self, ref):
        if ref not in self.runs:
            raise NotFound(f"no benchmark run {ref!r}", "none")
        columns = self.runs[ref][0]["columns"]
        return {
            "run": ref,
            "request": {},
            "columns": columns,
            "state": "SUCCEEDED",
            "reason": "",
            "progress": {},
            "cells": 2,
            "begun_s": 0.0,
            "ended_s": 1.0,
            "package": "",
        }

    def benchmark_lines(self, ref, after):
        self.benchmark(ref)
        return [line for line in self.runs[ref] if line["seq"] > after]

    def benchmark_baseline(self, ref):
        return self.benchmark(ref) | {"baseline": True}

    def benchmark_cancel(self, ref):
        return self.benchmark(ref)

    def close(self):
        self.closed = True
        if self.home:
            (Path(self.home) / "closed").write_text("yes")


def benchmark_lines(run, request):
    """A run over two pools in which xla takes twice as long."""
    columns = [("cpu", "cpu", 0.010), ("tpu:emulated", "xla", 0.020)]
    yield {
        "line": "begun",
        "run": run,
        "request": request,
        "columns": [
            {"column": c, "pool": pool, "kind": c, "job": f"{run}-{pool}", "number": 0} for c, pool, _ in columns
        ],
    }
    for name, pool, _ in columns:
        yield {
            "line": "column",
            "column": name,
            "host": "h",
            "facts": {"kind": name, "pool": pool, "emulated": ":" in name},
        }
    for name, _, seconds in columns:
        blocks = [
            {
                "round": n,
                "calls": 1,
                "parts_s": [seconds * (1 + n / 1000)],
                "cpu_s": seconds,
                "preempted": 0,
                "alone_s": seconds,
                "at": 0.0,
            }
            for n in range(12)
        ]
        case = {
            "case": "mlp/forward/b64-d256",
            "workload": "mlp",
            "family": "model",
            "mode": "forward",
            "item": "sample",
            "items": 64,
            "flops": 1e9,
            "min_bytes": 1e6,
            "precision": "fp32",
            "level": "O1",
            "regime": "hot",
        }
        yield {
            "line": "cell",
            "id": f"mlp@{name}",
            "column": name,
            "host": "h",
            "status": "measured",
            "reason": "",
            **case,
            "accuracy": {"ok": True},
            "blocks": blocks,
            "blocks_again": blocks,
            "first_call_s": 1.0,
            "host_before": None,
            "host_after": None,
        }
    yield {"line": "ended", "state": "SUCCEEDED", "reason": ""}


if __name__ == "__main__":
    from orchestrator.server.log import log_to_stderr
    from orchestrator.server.serve import serve

    parser = argparse.ArgumentParser()
    parser.add_argument("--home", type=Path)
    parser.add_argument("--port", type=int)
    log_to_stderr()
    given = parser.parse_args()
    serve(given.home, given.port, RecordingService)

"""Fields of a job's spec, each with a value and what becomes of it in the core. A new field is a row."""

from typing import Any

from orchestrator.core.model import Candidate
from workers.protocol.messages import ScriptCheckpoint

TRAIN: dict[str, Any] = {"entry": "t.py"}
RUN: dict[str, Any] = {"command": "true"}

ARRIVES: dict[str, tuple[dict[str, Any], Any, str, Any]] = {
    "name": (TRAIN, "n", "name", "n"),
    "task": (RUN | {"entry": "t.py:f", "command": ""}, "prepare", "task", "prepare"),
    "entry": (TRAIN, "u.py", "entry", "u.py"),
    "command": (RUN, ["ls"], "candidates.0.command", ("ls",)),
    "launch": (RUN, "ranks", "candidates.0.launch", "ranks"),
    "arguments": (TRAIN, {"lr": 1}, "candidates.0.arguments", {"lr": 1}),
    "env": (TRAIN, {"A": "1"}, "candidates.0.environment", {"A": "1"}),
    "secrets": (TRAIN, {"T": "env:T"}, "secrets", {"T": "env:T"}),
    "output_limit": (TRAIN, "5GB", "output_limit_bytes", 5 * 10**9),
    "precision": (TRAIN, "bf16", "candidates.0.precision", "bf16"),
    "batch_size": (TRAIN, 8, "candidates.0.batch_size", 8),
    "seed": (TRAIN, 7, "seed", 7),
    "priority": (TRAIN, 3, "priority", 3),
    "project": (TRAIN, "vision", "project", "vision"),
    "preemptible": (TRAIN, False, "preemptible", False),
    "weight": (TRAIN, 2.5, "weight", 2.5),
    "objective": (TRAIN, "cost", "objective", "cost"),
    "deadline": (TRAIN, 60, "deadline_s", 67.0),
    "workload": (TRAIN, "gpt2", "workload", "gpt2"),
    "resources.any_of": (TRAIN, [{}, {}], "candidates", (Candidate(("any",)),) * 2),
    "resources.ordered": (TRAIN, [{}, {}], "ordered", True),
    "resources.accelerators": (TRAIN, "cpu", "candidates.0.kinds", ("cpu",)),
    "resources.count": (TRAIN, 4, "candidates.0.count", 4),
    "resources.nodes": (TRAIN, 2, "candidates.0.nodes", 2),
    "resources.memory": (TRAIN, "1GB", "candidates.0.memory_bytes", 10**9),
    "resources.max_price": (TRAIN, 2.5, "candidates.0.max_price", 2.5),
    "resources.pool": (TRAIN, "a", "candidates.0.pool", "a"),
    "resources.pools": (TRAIN, ["a", "b"], "candidates.0.pools", ("a", "b")),
    "resources.exclude_pools": (TRAIN, ["a"], "candidates.0.not_pools", ("a",)),
    "resources.dtypes": (TRAIN, ["bf16"], "candidates.0.dtypes", ("bfloat16",)),
    "resources.features": (TRAIN, ["flash_attention"], "candidates.0.features", ("flash_attention",)),
    "resources.node": (TRAIN, "n1", "candidates.0.node", "n1"),
    "resources.exclusive": (TRAIN, True, "candidates.0.exclusive", True),
    "recovery.max_restarts": (TRAIN, 2, "recovery.max_restarts", 2),
    "recovery.max_interruptions": (TRAIN, 0, "recovery.max_interruptions", 0),
    "recovery.retry_exit_codes": (TRAIN, [75], "recovery.retry_exit_codes", (75,)),
    "recovery.backoff": (TRAIN, "2s", "recovery.backoff_s", 2.0),
    "recovery.lease": (TRAIN, "30s", "recovery.lease_s", 30.0),
    "recovery.grace": (TRAIN, "1m", "recovery.grace_s", 60.0),
    "recovery.on_events": (TRAIN, {"oom": "next"}, "recovery.on_events", {"oom": "next"}),
    "recovery.cross_vendor": (TRAIN, False, "recovery.cross_vendor", False),
    "recovery.on_disconnect": (TRAIN, "wait", "recovery.on_disconnect", "wait"),
    "recovery.hang_after": (TRAIN, "10m", "recovery.hang_after_s", 600.0),
    "checkpoint.keep": (TRAIN, 5, "keep_checkpoints", 5),
    "checkpoint.resume_from": (TRAIN, "a:b/step-1", "resume_from", "a:b/step-1"),
    "checkpoint.path": (RUN, "c.pt", "candidates.0.arguments", ScriptCheckpoint("c.pt").to_plain()),
    "checkpoint.format": (
        RUN | {"checkpoint": {"path": "c.pt"}},
        "torch",
        "candidates.0.arguments",
        ScriptCheckpoint("c.pt", "torch").to_plain(),
    ),
    "checkpoint.replicas": (TRAIN, 2, "replicas", 2),
    "work.steps": (TRAIN, 9, "work.steps", 9),
    "work.hours": (TRAIN | {"work": {"on": "cpu"}}, 3.0, "work.hours", 3.0),
    "work.on": (TRAIN | {"work": {"hours": 3.0}}, "cpu", "work.on", "cpu"),
}
"""By field of the spec: other fields of the job, the value written, and the core's field that then has which value."""

OF_JOB: dict[str, Any] = {
    "accelerators": "nvidia",
    "count": 2,
    "nodes": 3,
    "memory": "2GB",
    "max_price": 1,
    "pool": "z",
    "pools": ["z"],
    "exclude_pools": ["z"],
    "dtypes": ["fp16"],
    "features": ["collectives=nccl"],
    "node": "n2",
    "exclusive": False,
    "precision": "fp16",
    "batch_size": 4,
    "env": {"A": "2"},
    "command": "false",
    "launch": "node",
    "arguments": {"lr": 2},
}
"""Other values for the job of fields that its candidates may override."""

"""Every field of a job's spec arrives in the core's Job, and every field of that Job comes from somewhere."""

from dataclasses import fields
from operator import attrgetter, itemgetter
from typing import Any

import pytest

from orchestrator.core.model import Candidate, Data, DeclaredWork, Job, Recovery
from orchestrator.spec.job_spec import PARTS, JobSpec, parse_job
from orchestrator.spec.job_spec_parts import CandidateSpec, DataSpec
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

SPEC_ONLY = {"working_dir"}
"""Fields that the core does not get: the folder is sent as a code archive, which the job names by its hash."""

OF_THE_SERVER = {"id", "submitted_s", "package", "content_sha", "number"}
"""Fields of a core's Job that the server sets when it accepts a job."""

OF_THE_STATE = {"state", "epoch", "floor", "overtaken", "restarts", "interruptions", "refusals", "first_candidate"} | {
    *("avoid", "backend", "checkpoint_in")
}
"""Fields of a core's Job that its events change."""

COMPUTED = {"min_count", "whole_batch", "memory_estimated"}
"""Fields of a core's Candidate that several fields of the spec decide together."""


def with_field(base: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    part, _, name = field.rpartition(".")
    return base | ({part: base.get(part, {}) | {name: value}} if part else {name: value})


def in_core(data: dict[str, Any], field: str) -> Any:
    value: Any = parse_job(data).to_job("j", 7.0)
    for name in field.split("."):
        value = itemgetter(int(name))(value) if name.isdigit() else attrgetter(name)(value)
    return value


def test_every_field_of_the_spec_is_listed_here():
    parts = {name for name, _ in PARTS} | {"data"}
    names = {name for name in JobSpec.model_fields if name not in parts}
    names |= {f"{part}.{name}" for part, model in PARTS for name in model.model_fields}
    assert names == ARRIVES.keys() | SPEC_ONLY


@pytest.mark.parametrize("field", ARRIVES)
def test_a_field_of_the_spec_arrives_in_the_core_and_is_the_reason_for_its_value(field):
    base, written, name, value = ARRIVES[field]
    assert in_core(with_field(base, field, written), name) == value
    if field not in ("work.hours", "work.on"):  # one requires the other
        assert in_core(base, name) != value


@pytest.mark.parametrize("field", CandidateSpec.model_fields)
def test_a_candidates_own_value_of_a_field_overrides_that_of_the_job(field):
    of_job = next(name for name in (f"resources.{field}", field) if name in ARRIVES)
    base, written, name, value = ARRIVES[of_job]
    own = with_field(base, "resources.any_of", [{field: written}])
    assert in_core(with_field(own, of_job, OF_JOB[field]), name) == value


def test_every_field_of_the_core_comes_from_the_spec_the_server_or_the_state():
    arrives = {name for _, _, name, _ in ARRIVES.values()}
    job = {name.partition(".")[0] for name in arrives} | {"data"}
    assert {f.name for f in fields(Job)} == job | OF_THE_SERVER | OF_THE_STATE
    candidate = {name.removeprefix("candidates.0.") for name in arrives if name.startswith("candidates.0.")}
    assert {f.name for f in fields(Candidate)} == candidate | COMPUTED
    assert {f"recovery.{f.name}" for f in fields(Recovery)} <= arrives
    assert {f"work.{f.name}" for f in fields(DeclaredWork)} <= arrives


def test_data_arrives_as_it_is_written():
    written = {"uri": "s3://bucket/x", "mount": "data/", "sha256": "a" * 64}
    assert written.keys() == set(DataSpec.model_fields) == {f.name for f in fields(Data)}
    assert in_core(TRAIN | {"data": [written]}, "data") == (Data(**written),)


def test_an_empty_spec_has_the_defaults_of_the_core():
    assert parse_job(TRAIN).to_job("train", 0.0) == Job("train", "train", "train", (Candidate(("any",)),), entry="t.py")

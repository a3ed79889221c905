"""Every field of a job's spec arrives in the core's Job, and every field of that Job comes from somewhere."""

from dataclasses import fields
from operator import attrgetter, itemgetter
from typing import Any

import pytest

from orchestrator.core.model import Candidate, Data, DeclaredWork, Job, Recovery
from orchestrator.spec.job_spec import PARTS, JobSpec, parse_job
from orchestrator.spec.job_spec_parts import CandidateSpec, DataSpec
from tests.spec_fields import ARRIVES, OF_JOB, TRAIN

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

import json
import math
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import SpecError, UserError
from orchestrator.core.model import Candidate, DeclaredWork, Job, Recovery
from orchestrator.spec.job_spec import JobSpec, job_schema, load_job, parse_job
from orchestrator.spec.job_spec_parts import Failing
from workers.protocol.failure_kinds import FAILURE_KINDS
from workers.protocol.messages import ScriptCheckpoint

FULL = {
    "name": "finetune",
    "task": "train",
    "entry": "train.py:main",
    "arguments": {"lr": 0.1, "layers": [1, 2]},
    "working_dir": ".",
    "env": {"A": "job", "B": "job"},
    "secrets": {"HF_TOKEN": "env:HF_TOKEN", "KEY": "file:/run/key"},
    "resources": {
        "nodes": 2,
        "memory": "16GiB",
        "max_price": 2.5,
        "ordered": [
            {"accelerators": "nvidia:H100:2..8", "precision": "bf16", "env": {"B": "gpu"}, "arguments": {"lr": 0.2}},
            {"accelerators": "cpu", "nodes": 1, "memory": "1GB", "pool": "cpu", "batch_size": 4, "max_price": 1},
        ],
    },
    "output_limit": "50GB",
    "precision": "fp32",
    "batch_size": 32,
    "priority": -5,
    "objective": "cost",
    "recovery": {
        "max_restarts": 2,
        "max_interruptions": 10,
        "retry_exit_codes": [75],
        "backoff": "500ms",
        "lease": 30,
        "grace": "1m",
        "on_events": {"oom": "next", "nan": "ignore"},
        "cross_vendor": False,
        "on_disconnect": "wait",
        "hang_after": "10m",
    },
    "checkpoint": {"keep": 5, "resume_from": "cpu:finetune-0a1b2c/step-10"},
}


def error(data) -> SpecError:
    with pytest.raises(SpecError) as raised:
        parse_job(data)
    return raised.value


def only(job: Job) -> Candidate:
    [candidate] = job.candidates
    return candidate


def test_a_full_spec_becomes_a_job_with_everything_filled_in():
    assert parse_job(FULL).to_job("finetune-1", 7.0) == Job(
        id="finetune-1",
        name="finetune",
        task="train",
        candidates=(
            Candidate(
                kinds=("nvidia:H100",),
                count=8,
                min_count=2,
                nodes=2,
                memory_bytes=16 * 2**30,
                precision="bf16",
                batch_size=32,
                whole_batch=True,
                environment={"A": "job", "B": "gpu"},
                arguments={"lr": 0.2, "layers": [1, 2]},
                max_price=2.5,
            ),
            Candidate(
                kinds=("cpu",),
                pool="cpu",
                memory_bytes=10**9,
                precision="fp32",
                batch_size=4,
                environment={"A": "job", "B": "job"},
                arguments={"lr": 0.1, "layers": [1, 2]},
                max_price=1.0,
            ),
        ),
        ordered=True,
        priority=-5,
        objective="cost",
        submitted_s=7.0,
        recovery=Recovery(
            2, 10, (75,), 0.5, 30.0, 60.0, {"oom": "next", "nan": "ignore"}, False, "wait", 600.0,
        ),
        entry="train.py:main",
        secrets={"HF_TOKEN": "env:HF_TOKEN", "KEY": "file:/run/key"},
        keep_checkpoints=5,
        resume_from="cpu:finetune-0a1b2c/step-10",
        output_limit_bytes=50 * 10**9,
    )  # fmt: skip


def test_recovery_left_out_is_the_default_of_the_core():
    assert parse_job({"entry": "train.py"}).to_job("t", 0.0).recovery == Recovery()
    assert Recovery().lease_s == 10.0


@pytest.mark.parametrize(("written", "means"), [("", 0.0), ("never", -1.0), (30, 30.0), ("1h30m", 5400.0)])
def test_a_hang_is_a_duration_never_or_the_default_rule(written, means):
    spec = parse_job({"entry": "train.py", "recovery": {"hang_after": written}})
    assert spec.to_job("t", 0.0).recovery.hang_after_s == means


@pytest.mark.parametrize(
    ("written", "means"),
    [
        ({"steps": 1000}, DeclaredWork(steps=1000)),
        ({"hours": 3, "on": "h100"}, DeclaredWork(hours=3.0, on="nvidia:H100")),
        ({"hours": 0.5, "on": "cpu"}, DeclaredWork(hours=0.5, on="cpu")),
        (None, DeclaredWork()),
    ],
)
@pytest.mark.parametrize("task", [{"entry": "m.py:f", "task": "benchmark"}, {"entry": "a.py"}, {"command": "true"}])
def test_a_job_of_any_task_may_say_how_much_work_it_is(task, written, means):
    assert parse_job({**task, "work": written}).to_job("t", 0.0).work == means


def test_the_kinds_of_failure_in_a_spec_are_those_that_nodes_tell():
    assert get_args(Failing) == tuple(FAILURE_KINDS)


def test_the_shortest_specs_mean_what_one_thinks():
    train, run = parse_job({"entry": "train.py"}), parse_job({"command": "echo hi | cat"})
    assert (train.task, train.name, run.task, run.name) == ("train", "train", "run", "run")
    assert only(train.to_job("t", 0.0)) == Candidate(("any",))
    assert only(run.to_job("r", 0.0)) == Candidate(("any",), command=("/bin/sh", "-c", "echo hi | cat"))
    assert only(parse_job({"command": ["ls", "-l"]}).to_job("r", 0.0)).command == ("ls", "-l")


@pytest.mark.parametrize("data", [FULL, {"entry": "a.py"}, {"command": ["x"], "resources": {"gpus": {"H100": 8}}}])
def test_a_spec_can_be_written_down_and_read_again(data):
    spec = parse_job(data)
    for dumped in (spec.model_dump(mode="json"), spec.model_dump(mode="json", exclude_defaults=True)):
        again = parse_job(json.loads(json.dumps(dumped)))
        assert again.to_job("j", 1.0) == spec.to_job("j", 1.0)
        assert (again.task, again.secrets, again.checkpoint) == (spec.task, spec.secrets, spec.checkpoint)


# -- resources


def test_a_list_of_accelerators_is_in_order_and_a_mapping_is_not():
    listed = parse_job({"entry": "a.py", "resources": {"accelerators": ["H100:8", "cpu"], "nodes": 2}}).to_job("j", 0)
    mapped = parse_job({"entry": "a.py", "resources": {"accelerators": {"H100": 8, "MI300X": 8}}}).to_job("j", 0)
    assert listed.ordered
    assert [(c.kinds, c.count, c.nodes) for c in listed.candidates] == [(("nvidia:H100",), 8, 2), (("cpu",), 1, 2)]
    assert not mapped.ordered
    assert [(c.kinds, c.count) for c in mapped.candidates] == [(("nvidia:H100",), 8), (("amd:MI300X",), 8)]


def test_candidates_take_from_resources_what_they_leave_out():
    resources = {
        "accelerators": "H100",
        "count": 8,
        "pool": "p",
        "any_of": [{}, {"count": 4}, {"accelerators": "A100:2"}, {"accelerators": "A100"}, {"pool": "q"}],
    }
    job = parse_job({"entry": "a.py", "resources": resources}).to_job("j", 0)
    assert [(c.kinds[0], c.count, c.pool) for c in job.candidates] == [
        ("nvidia:H100", 8, "p"),
        ("nvidia:H100", 4, "p"),
        ("nvidia:A100", 2, "p"),
        ("nvidia:A100", 8, "p"),
        ("nvidia:H100", 8, "q"),
    ]
    assert not job.ordered


def test_a_job_may_ask_for_whole_nodes():
    data = {
        "command": "x",
        "resources": {"exclusive": True, "any_of": [{"pool": "a"}, {"pool": "b", "exclusive": False}]},
    }
    job = parse_job(data).to_job("j", 0)
    assert [(c.pool, c.exclusive, c.count) for c in job.candidates] == [("a", True, 1), ("b", False, 1)]


@pytest.mark.parametrize("resources", [{"accelerators": "nvidia:8"}, {"count": "2..8"}, {"any_of": [{"count": 2}]}])
def test_a_whole_node_and_a_number_of_devices_contradict_each_other(resources):
    with pytest.raises(SpecError, match=r"exclusive takes all .* devices of a node, but a number is also set"):
        parse_job({"command": "x", "resources": {"exclusive": True, **resources}})


def test_a_candidate_of_a_run_job_may_bring_its_own_command():
    resources = {"ordered": [{"accelerators": "nvidia", "command": ["torchrun", "x.py"]}, {"accelerators": "cpu"}]}
    job = parse_job({"command": "python x.py", "resources": resources}).to_job("j", 0)
    assert [c.command for c in job.candidates] == [("torchrun", "x.py"), ("/bin/sh", "-c", "python x.py")]
    assert error({"task": "run", "resources": resources}).field == "command"


def test_a_command_is_launched_once_per_node_unless_job_or_candidate_say_ranks():
    resources = {"ordered": [{"accelerators": "nvidia:H100:8"}, {"accelerators": "cpu", "launch": "node"}]}
    job = parse_job({"command": "x", "launch": "ranks", "resources": resources}).to_job("j", 0)
    assert [c.launch for c in job.candidates] == ["ranks", "node"]
    assert only(parse_job({"command": "x"}).to_job("j", 0)).launch == "node"
    assert "did you mean 'ranks'?" in str(error({"command": "x", "launch": "rank"}))


# -- what is wrong is named, with the field and what to write


@pytest.mark.parametrize(
    ("data", "field", "message"),
    [
        ({"workdir": "."}, "workdir", "unknown key 'workdir'; did you mean 'working_dir'?"),
        ({"envs": {}}, "envs", "did you mean 'env'?"),
        ({"accelerators": "H100"}, "accelerators", "belongs under `resources`; write resources: {accelerators: …}"),
        ({"max_restarts": 1}, "max_restarts", "belongs under `recovery`"),
        ({"gpus": "H100"}, "gpus", "belongs under `resources`"),
        ({"resources": {"acelerators": "cpu"}}, "resources.acelerators", "did you mean 'accelerators'?"),
        ({"resources": {"ordered": [{}, {"cuont": 1}]}}, "resources.ordered.1.cuont", "did you mean 'count'?"),
        ({"resources": {"any_of": [{}], "ordered": [{}]}}, "resources", "has both any_of and ordered"),
        ({"resources": {"any_of": "cpu"}}, "resources.any_of", "must be a list"),
        ({"resources": {"accelerators": "H10"}}, "resources.accelerators", "did you mean 'H100'?"),
        ({"resources": {"accelerators": "H100", "gpus": "H100"}}, "resources", "gpus and accelerators are the same"),
        ({"resources": {"accelerators": "H100:8", "count": 8}}, "resources.count", "is set twice"),
        ({"resources": {"count": 0}}, "resources.count", "0 is not a valid range of devices"),
        ({"resources": {"nodes": 0}}, "resources.nodes", "greater than or equal to 1"),
        ({"resources": {"nodes": "2"}}, "resources.nodes", "must be a valid integer"),
        ({"resources": {"nodes": True}}, "resources.nodes", "must be a valid integer"),
        ({"resources": {"memory": 16}}, "resources.memory", "16 is not a size; write a number and a unit"),
        ({"resources": {"max_price": 0}}, "resources.max_price", "greater than 0"),
        ({"resources": {"max_price": "2 USD"}}, "resources.max_price", "must be a valid number"),
        ({"resources": []}, "resources", "must be a mapping"),
        ({"data": [{"uri": "file:///x", "mount": "d"}]}, "data.0.uri", "write its path, without file://"),
        ({"data": [{"uri": "memory://x", "mount": "d"}]}, "data.0.uri", "not an object store's"),
        ({"data": [{"uri": "s3://bucket/../x", "mount": "d"}]}, "data.0.uri", "it has an empty part, `.` or `..`"),
        ({"data": [{"uri": "cpu:../x", "mount": "d"}]}, "data.0.uri", "is not inside the pool's storage"),
        ({"data": [{"uri": "cpu:.uploads/x", "mount": "d"}]}, "data.0.uri", "is hidden in the pool's storage"),
        ({"data": [{"uri": "", "mount": "d"}]}, "data.0.uri", "must name data"),
        ({"data": [{"uri": "./x", "mount": "../d"}]}, "data.0.mount", "is not in the job's folder"),
        ({"data": [{"uri": "./x", "mount": "/d"}]}, "data.0.mount", "it is absolute"),
        ({"data": [{"uri": "./x", "mount": "./"}]}, "data.0.mount", "it is empty"),
        ({"data": [{"uri": "./x"}]}, "data.0.mount", "is required"),
        ({"data": [{"uri": "./x", "mount": "d", "sha256": "1"}]}, "data.0.sha256", "the 64 digits that `sha256sum`"),
        (
            {"data": [{"uri": "./x", "mount": "d/"}, {"uri": "./y", "mount": "d/e"}]},
            "data",
            "none inside another",
        ),
        ({"output_limit": "many"}, "output_limit", "'many' is not a size; write a number and a unit"),
        ({"priority": 1001}, "priority", "less than or equal to 1000"),
        ({"priority": "high"}, "priority", "must be a valid integer"),
        ({"objective": "fast"}, "objective", "valid: any, throughput, cost, energy, finish_time, deadline"),
        ({"precision": "fp23"}, "precision", "did you mean 'fp32'?"),
        ({"task": "tarin"}, "task", "did you mean 'train'?"),
        ({"name": "a b"}, "name", "'a b' is not a valid name"),
        ({"name": "../x"}, "name", "is not a valid name"),
        ({"name": "a.b"}, "name", "is not a valid name"),
        ({"name": "x" * 64}, "name", "is not a valid name"),
        ({"entry": "../train.py"}, "entry", "does not name a function"),
        ({"entry": "/abs/train.py"}, "entry", "does not name a function"),
        ({"entry": "train.py:"}, "entry", "does not name a function"),
        ({"entry": "train-it:main"}, "entry", "does not name a function"),
        ({"env": {"A": True}}, "env", "A must be text or a number; put the value in quotes"),
        ({"env": {"A": None}}, "env", "A must be text or a number"),
        ({"env": {"1A": "x"}}, "env", "'1A' cannot be an environment variable"),
        ({"env": {"A": "x\0"}}, "env", "A must be text"),
        ({"env": {"RAY_ADDRESS": "x"}}, "env", "RAY_ADDRESS is set by Polyfleet itself"),
        ({"env": {"CUDA_VISIBLE_DEVICES": "0"}}, "env", "CUDA_VISIBLE_DEVICES is set by Polyfleet itself"),
        ({"env": "A=1"}, "env", "must be a mapping"),
        ({"recovery": {"max_restart": 1}}, "recovery.max_restart", "did you mean 'max_restarts'?"),
        ({"recovery": {"max_restarts": -2}}, "recovery.max_restarts", "greater than or equal to -1"),
        ({"recovery": {"grace": "1:30"}}, "recovery.grace", "'1:30' is not a duration"),
        ({"recovery": {"grace": "8d"}}, "recovery.grace", "8d is longer than 7 days"),
        ({"recovery": {"lease": "1s"}}, "recovery.lease", "1s is too short; write at least 5s"),
        ({"recovery": {"lease": "4s"}}, "recovery.lease", "4s is too short; write at least 5s"),
        ({"recovery": {"hang_after": "1s"}}, "recovery.hang_after", "1s is too short; write at least 5s, or never"),
        ({"recovery": {"hang_after": "often"}}, "recovery.hang_after", "'often' is not a duration"),
        ({"recovery": {"hang_after": "9d"}}, "recovery.hang_after", "9d is longer than 7 days"),
        ({"recovery": {"on_events": {"oom": "again"}}}, "recovery.on_events.oom", "valid: restart, retry, next"),
        ({"recovery": {"on_events": {"memory": "next"}}}, "recovery.on_events.memory", "valid: user, oom, signal"),
        ({"recovery": {"on_events": {"oom": "ignore"}}}, "recovery.on_events", "oom cannot be ignored; write restart"),
        ({"recovery": {"on_events": {"hang": "ignore"}}}, "recovery.on_events", "write `hang_after: never`"),
        ({"recovery": {"on_disconnect": "retry"}}, "recovery.on_disconnect", "valid: restart, wait, stop"),
        ({"recovery": {"cross_vendor": "no"}}, "recovery.cross_vendor", "must be true or false, got 'no'"),
        ({"recovery": {"retry_exit_codes": [0]}}, "recovery.retry_exit_codes.0", "greater than or equal to 1"),
        ({"preemptible": "never"}, "preemptible", "must be true or false, got 'never'"),
        ({"weight": 0}, "weight", "greater than or equal to 0.01, got 0"),
        ({"weight": 101}, "weight", "less than or equal to 100"),
        ({"weight": float("nan")}, "weight", "must be a finite number"),
        ({"objective": "deadline"}, "deadline", "is required with objective: deadline"),
        ({"deadline": "2026-12-01T18:00:00"}, "deadline", "has no time zone; write a time with its zone"),
        ({"deadline": "2026-12-01"}, "deadline", "has no time zone"),
        ({"deadline": "tomorrow"}, "deadline", "is neither a time nor a duration"),
        ({"deadline": True}, "deadline", "is neither a time nor a duration"),
        ({"deadline": "0s"}, "deadline", "is not between now and in 10 years"),
        ({"deadline": "9999d"}, "deadline", "is not between now and in 10 years"),
        ({"work": {}}, "work", "is empty; write {steps: 1000} or {hours: 3, on: nvidia:H100}"),
        ({"work": {"steps": 5, "hours": 1.0, "on": "cpu"}}, "work", "has both steps and hours; keep one of them"),
        ({"work": {"steps": 0}}, "work.steps", "greater than or equal to 1, got 0"),
        ({"work": {"steps": -1}}, "work.steps", "greater than or equal to 1"),
        ({"work": {"steps": 1.5}}, "work.steps", "must be a valid integer"),
        ({"work": {"steps": 2**60}}, "work.steps", "less than or equal to"),
        ({"work": {"hours": 0, "on": "cpu"}}, "work.hours", "greater than 0, got 0"),
        ({"work": {"hours": -2, "on": "cpu"}}, "work.hours", "greater than 0"),
        ({"work": {"hours": float("nan"), "on": "cpu"}}, "work.hours", "must be a finite number, got nan"),
        ({"work": {"hours": float("inf"), "on": "cpu"}}, "work.hours", "must be a finite number"),
        ({"work": {"hours": 3}}, "work.on", "is required with hours; add `on`"),
        (
            {"work": {"steps": 3, "on": "cpu"}},
            "work.on",
            "is the kind of device for `hours`, which is missing; add hours",
        ),
        ({"work": {"hours": 3, "on": "nvidia:H10O"}}, "work.on", "did you mean 'nvidia:H100'?"),
        ({"work": {"hours": 3, "on": "nvidia"}}, "work.on", "is a back end with many models; name one of them"),
        ({"work": {"step": 3}}, "work.step", "unknown key 'step'; did you mean 'steps'?"),
        ({"work": 1000}, "work", "must be a mapping"),
        ({"steps": 3}, "steps", "belongs under `work`; write work: {steps: …}"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep", "greater than or equal to 1"),
        ({"checkpoint": {"resume_from": "p:../x"}}, "checkpoint.resume_from", "is not a checkpoint"),
        ({"checkpoint": {"every": 5}}, "checkpoint.every", "unknown key 'every'"),
    ],
)
def test_a_wrong_field_is_named_with_what_to_write(data, field, message):
    raised = error({"entry": "train.py", **data})
    assert raised.field == field
    assert message in str(raised)


@pytest.mark.parametrize(
    ("data", "field", "message"),
    [
        ({}, "entry", "a train job needs an entry"),
        ({"task": "prepare"}, "entry", "a prepare job needs an entry"),
        ({"task": "benchmark", "entry": "m.py"}, "entry", "m.py does not name a function; write m.py:NAME"),
        ({"task": "run"}, "command", "a run job needs a command"),
        ({"entry": "a.py", "command": "x"}, "command", "applies to run jobs only; this is a train job; leave it out"),
        (
            {"task": "run", "command": "x", "entry": "a.py"},
            "entry",
            "this is a run job; put it into the command or env",
        ),
        ({"command": "x", "arguments": {"a": 1}}, "arguments", "applies to prepare, train, benchmark jobs"),
        ({"command": "x", "precision": "bf16"}, "precision", "this is a run job"),
        (
            {"command": "x", "checkpoint": {"keep": 1}},
            "checkpoint.keep",
            "applies to train jobs only; this is a run job; write",
        ),
        (
            {"entry": "a.py", "checkpoint": {"path": "a"}},
            "checkpoint.path",
            "applies to run jobs only; this is a train job",
        ),
        ({"task": "benchmark", "entry": "m:f", "checkpoint": {"keep": 1}}, "checkpoint", "applies to train, run jobs"),
        ({"task": "prepare", "entry": "m:f", "batch_size": 2}, "batch_size", "applies to train, benchmark jobs"),
        (
            {"command": "x", "resources": {"any_of": [{}, {"batch_size": 2}]}},
            "resources.any_of.1.batch_size",
            "this is a run job",
        ),
        ({"entry": "a.py", "launch": "node"}, "launch", "applies to run jobs only; this is a train job; leave it out"),
        (
            {"entry": "a.py", "resources": {"any_of": [{"launch": "ranks"}]}},
            "resources.any_of.0.launch",
            "applies to run jobs only",
        ),
        (
            {"entry": "a.py", "resources": {"ordered": [{"command": "x"}]}},
            "resources.ordered.0.command",
            "applies to run jobs only; this is a train job",
        ),
    ],
)
def test_a_field_the_task_does_not_read_is_refused_with_a_sentence(data, field, message):
    raised = error(data)
    assert raised.field == field
    assert message in str(raised)


@pytest.mark.parametrize(
    ("written", "field", "message"),
    [
        (
            {"path": "/a.pt"},
            "checkpoint.path",
            "it is absolute; write a path in $POLYFLEET_OUTPUT_DIR, such as ckpt.pt",
        ),
        ({"path": "../a.pt"}, "checkpoint.path", "is not inside the job's folder"),
        ({"path": "."}, "checkpoint.path", "'.' is the complete folder; name a file or folder in it"),
        ({"path": ".polyfleet/a"}, "checkpoint.path", "is where Polyfleet keeps its copy"),
        ({"path": "a", "format": "tourch"}, "checkpoint.format", "unknown format 'tourch'; did you mean 'torch'?"),
        ({"format": "dcp"}, "checkpoint.format", "is the format of checkpoint.path, which is missing; add path"),
        ({"paht": "a"}, "checkpoint.paht", "path"),
    ],
)
def test_a_script_s_checkpoint_is_a_path_in_its_folder_of_a_known_format(written, field, message):
    raised = error({"command": "x", "checkpoint": written})
    assert raised.field == field and message in str(raised)


def test_a_command_s_node_is_told_of_its_checkpoint_by_the_order_s_arguments():
    job = parse_job({"command": "x", "checkpoint": {"path": "./run/ckpt.pt"}}).to_job("j", 0.0)
    asked = ScriptCheckpoint.of("run", job.candidates[0].arguments)
    assert asked == ScriptCheckpoint("run/ckpt.pt", "auto", found=False)
    plain = parse_job({"command": "x"}).to_job("j", 0.0)
    assert ScriptCheckpoint.of("run", plain.candidates[0].arguments) is None


@pytest.mark.parametrize("command", [5, [], [""], ["a", 5], " ", ["a\0"], {"x": 1}])
def test_a_command_is_a_line_or_words(command):
    assert error({"task": "run", "command": command}).field == "command"


@pytest.mark.parametrize(
    "secrets",
    [
        {"A": "hunter2"},
        {"A": {"value": "hunter2"}},
        {"A": ["hunter2"]},
        ["hunter2"],
        "hunter2",
        {"A": "file:hunter2"},
        {"A": "env:hunter2 "},
        {"A": "vault:hunter2"},
    ],
)
def test_a_secret_written_out_is_refused_and_never_repeated(secrets):
    raised = error({"command": "x", "secrets": secrets})
    assert raised.field == "secrets"
    assert "hunter2" not in str(raised) + repr(raised.args)


def test_a_spec_cannot_be_changed_behind_anybodys_back():
    with pytest.raises(ValueError, match="frozen"):
        parse_job({"entry": "a.py"}).priority = 5


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from([*JobSpec.model_fields, "accelerators", "any_of", "ordered", "count", "lease", "keep"])


@settings(max_examples=400, deadline=None)
@given(data=st.dictionaries(keys, json_values | st.dictionaries(keys, json_values, max_size=3), max_size=4))
def test_any_data_is_a_spec_or_a_spec_error(data):
    try:
        spec = parse_job(data)
    except SpecError as e:
        assert e.message
        return
    assert spec.to_job("j", 0.0).candidates


# -- files


def write(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text)
    return path


def test_a_file_is_read_and_its_folder_found_beside_it(tmp_path):
    (tmp_path / "code").mkdir()
    spec = load_job(write(tmp_path, "entry: train.py\nworking_dir: code\nresources: {accelerators: 'cpu:1'}\n"))
    assert spec.working_dir == str(tmp_path / "code")
    assert load_job(write(tmp_path, "command: echo hi\n")).working_dir == ""


def test_text_in_a_file_arrives_as_it_is_written(tmp_path):
    spec = load_job(
        write(
            tmp_path,
            "name: 0123\ncommand: [python, train.py, --lr, 0.10, --amp, true, --id, 12e4, --size, 1_000]\n"
            "project: 2026\nenv: {PY: 3.10, ZIP: 02134, MASK: 0x1F, DAY: 2026-11-25, FLAG: on, AMP: true, BIG: 1e999}\n"
            "resources: {ordered: [{pool: 7, env: {PY: 3.20}, command: [echo, 1.0]}, {node: 1.0, command: 1.50}]}\n",
        )
    )
    assert (spec.name, spec.project) == ("0123", "2026")
    assert spec.argv == ("python", "train.py", "--lr", "0.10", "--amp", "true", "--id", "12e4", "--size", "1_000")
    assert dict(spec.env) == {
        "PY": "3.10", "ZIP": "02134", "MASK": "0x1F", "DAY": "2026-11-25", "FLAG": "on", "AMP": "true", "BIG": "1e999",
    }  # fmt: skip
    first, second = spec.resources.ordered
    assert (first.pool, first.env, first.command) == ("7", {"PY": "3.20"}, ("echo", "1.0"))
    assert (second.node, second.command) == ("1.0", "1.50")


def test_numbers_of_a_file_stay_numbers(tmp_path):
    text = "entry: a.b:c\narguments: {lr: 0.10, layers: [1, 2], amp: true}\nseed: 010\n"
    text += "weight: 2.50\nrecovery: {grace: 5}\n"
    spec = load_job(write(tmp_path, text))
    assert spec.arguments == {"lr": 0.1, "layers": [1, 2], "amp": True}
    assert (spec.seed, spec.weight, spec.recovery.grace) == (10, 2.5, 5)


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("command: [python, ~, x]", "command", "item 2 is null, not text"),
        ("command: [python, [x]]", "command", "item 2 is ['x'], not text"),
        ("command: echo\nenv: {A: }", "env", "A must be text or a number"),
    ],
)
def test_words_and_variables_without_text_are_refused_by_name(tmp_path, text, field, message):
    with pytest.raises(SpecError) as refused:
        load_job(write(tmp_path, text))
    assert refused.value.field == field
    assert message in str(refused.value)
    assert "quotes" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("entry: train.py\nworking_dir: nowhere\n", "working_dir", "there is no folder"),
        ("entry: train.py\n", "working_dir", "is required: train.py is a file in it; write working_dir: ."),
        ("entry: train.py\nprioritty: 5\n", "prioritty", "unknown key 'prioritty' (in"),
    ],
)
def test_what_is_wrong_in_a_file_names_the_field(tmp_path, text, field, message):
    with pytest.raises(SpecError) as raised:
        load_job(write(tmp_path, text))
    assert raised.value.field == field
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "text",
    ["", "- a\n", "a: &x 1\nb: *x\n", "a: 1\na: 2\n", "a: {" * 50, "!!python/object:os.system {}\n", "a: .nan\n"],
)
def test_what_is_no_plain_yaml_is_refused_with_the_files_name(tmp_path, text):
    with pytest.raises(UserError, match=r"job\.yaml"):
        load_job(write(tmp_path, text))


def test_a_file_that_cannot_be_read_is_a_users_error(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        load_job(tmp_path / "job.yaml")
    with pytest.raises(UserError, match="Is a directory"):
        load_job(tmp_path)
    (tmp_path / "job.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not UTF-8"):
        load_job(tmp_path / "job.yaml")


# -- the schema


def test_the_schema_lists_every_field_forbids_others_and_is_plain_json():
    schema = json.loads(json.dumps(job_schema()))
    assert set(schema["properties"]) == set(JobSpec.model_fields)
    assert schema["additionalProperties"] is False
    assert "required" not in schema
    assert schema["properties"]["priority"]["maximum"] == 1000
    for model in schema["$defs"].values():
        assert model["additionalProperties"] is False
    assert "gpus" in schema["$defs"]["CandidateSpec"]["properties"]


def test_every_field_that_needs_it_has_a_description_in_the_schema():
    schema = job_schema()
    bare = {name for name, field in schema["properties"].items() if "description" not in field and "$ref" not in field}
    assert bare <= {"env", "precision", "batch_size", "priority", "objective"}


def ranged(accelerators, batch_size, **more):
    return {"entry": "train.py", "batch_size": batch_size, "resources": {"accelerators": accelerators, **more}}


@pytest.mark.parametrize(
    ("accelerators", "batch_size", "nodes", "counts"),
    [
        ("cpu:1..4", 30, 1, (1, 2, 3)),
        ("cpu:2..8", 64, 1, (2, 4, 8)),
        ("cpu:2..8", 64, 4, (2, 4, 8)),
        ("cpu:1..8", 12, 3, (1, 2, 4)),
        ("cpu:2+", 6, 1, (2, 3, 6)),
    ],
)
def test_of_a_range_only_numbers_of_devices_that_divide_the_whole_batch_are_taken(
    accelerators, batch_size, nodes, counts
):
    candidate = only(parse_job(ranged(accelerators, batch_size, nodes=nodes)).to_job("t", 0.0))
    assert candidate.whole_batch
    assert (candidate.counts, candidate.min_count, candidate.count) == (counts, counts[0], counts[-1])


def test_a_whole_batch_that_no_number_of_the_range_divides_is_refused_with_one_that_can():
    assert str(error(ranged("cpu:4..5", 6))) == (
        "batch_size: 6 cannot be divided evenly among any number of ranks from 4 to 5; write a multiple of 4, e.g. 8"
    )


def test_without_a_range_the_batch_is_that_of_one_rank():
    assert not only(parse_job(ranged("cpu:4", 30)).to_job("t", 0.0)).whole_batch
    assert only(parse_job({"entry": "train.py", "resources": {"accelerators": "cpu:1..3"}}).to_job("t", 0)).counts == (
        1, 2, 3,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("written", "wall_s"),
    [
        ("1970-01-01T00:01:41Z", 101.0),
        ("1970-01-01T02:01:41+02:00", 101.0),
        ("1h30m", 5500.0),
        (20, 120.0),
    ],
)
def test_a_deadline_is_a_time_or_so_long_after_the_submission(written, wall_s):
    job = parse_job({"command": "true", "deadline": written, "weight": 2.5}).to_job("t", 100.0)
    assert (job.deadline_s, job.weight, job.objective) == (wall_s, 2.5, "any")


def test_a_deadline_that_is_past_when_the_job_is_submitted_is_refused():
    spec = parse_job({"command": "true", "deadline": "1970-01-01T00:01:40Z"})
    with pytest.raises(SpecError, match="is in the past; it is 1970-01-01T00:01:40") as raised:
        spec.to_job("t", 100.0)
    assert raised.value.field == "deadline"


def test_pools_and_dtypes_are_of_each_candidate_or_of_the_job():
    written = {
        "pools": ["a", "b"],
        "exclude_pools": ["c"],
        "dtypes": ["bf16"],
        "any_of": [{}, {"pool": "d", "dtypes": ["fp8"]}],
    }
    with pytest.raises(SpecError, match="unknown dtype 'fp8'") as raised:
        parse_job({"command": "x", "resources": written})
    assert raised.value.field == "resources.any_of.1.dtypes.0"
    written["any_of"][1]["dtypes"] = ["float8_e4m3fn"]
    first, second = parse_job({"command": "x", "resources": written}).to_job("j", 1.0).candidates
    assert (first.pool, first.pools, first.not_pools, first.dtypes) == ("", ("a", "b"), ("c",), ("bfloat16",))
    assert (second.pool, second.pools, second.not_pools, second.dtypes) == ("d", (), ("c",), ("float8_e4m3fn",))
    with pytest.raises(SpecError, match="has both pool and pools"):
        parse_job({"command": "x", "resources": {"pool": "a", "pools": ["b"]}})


def test_features_are_of_each_candidate_or_of_the_job_and_those_of_the_catalogue():
    written = {"features": ["flash_attention"], "any_of": [{}, {"features": ["collectives=nccl", "xla"]}]}
    first, second = parse_job({"command": "x", "resources": written}).to_job("j", 1.0).candidates
    assert (first.features, second.features) == (("flash_attention",), ("collectives=nccl", "xla"))
    for word, near in (("flash_atention", "flash_attention"), ("compile=inducter", "compile=inductor")):
        with pytest.raises(SpecError, match=f"unknown feature '{word}'") as raised:
            parse_job({"command": "x", "resources": {"features": [word]}})
        assert raised.value.field == "resources.features.0" and f"'{near}'" in raised.value.args[2]


LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def test_memory_is_estimated_from_the_numbers_of_a_model_for_each_candidate(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    written = {
        "task": "train",
        "entry": "json:loads",
        "precision": "bf16",
        "resources": {
            "memory": {"model": "config.json", "seq": 2048},
            "any_of": [{"batch_size": 1}, {"batch_size": 4}, {"memory": "40GB"}, {"precision": "fp32"}],
        },
    }
    (tmp_path / "job.yaml").write_text(json.dumps(written))
    one, four, said, fp32 = load_job(tmp_path / "job.yaml").to_job("j", 1.0).candidates
    weights = 8.03e9
    assert 8 * weights < one.memory_bytes < 8.5 * weights  # bf16 weights, gradients, two moments
    assert one.memory_bytes < four.memory_bytes < fp32.memory_bytes
    assert said.memory_bytes == 40 * 10**9
    assert [c.memory_estimated for c in (one, four, said, fp32)] == [True, True, False, True]


def test_a_batch_that_ranks_share_is_estimated_as_the_greatest_share():
    resources = {"accelerators": "cpu:1..4", "memory": {"model": LLAMA, "seq": 2048}}
    job = {"task": "train", "entry": "json:loads", "batch_size": 8, "resources": resources}
    shared = parse_job(job).to_job("j", 1.0).candidates[0]
    alone = parse_job(job | {"resources": resources | {"accelerators": "cpu:1"}}).to_job("j", 1.0).candidates[0]
    assert shared.memory_bytes == alone.memory_bytes


@pytest.mark.parametrize(
    ("memory", "field", "said"),
    [
        ({"model": {}}, "resources.memory", "the configuration lacks hidden, layers, vocab, heads, seq"),
        ({"model": LLAMA | {"hidden_size": math.nan}}, "resources.memory", "hidden of a transformer is nan"),
        ({"model": LLAMA | {"hidden_size": "4096"}}, "resources.memory", "hidden of a transformer is '4096'"),
        (
            {"model": LLAMA | {"type_vocab_size": "2", "model_type": "bert"}},
            "resources.memory",
            "not the dimensions of a transformer",
        ),
        ({"model": LLAMA, "optimizer": "adamv"}, "resources.memory", "unknown optimizer 'adamv'"),
        ({"model": LLAMA, "sequence": 1}, "resources.memory.sequence", "unknown"),
        ({"model": LLAMA, "mode": "train"}, "resources.memory.mode", "training"),
        ({"model": 7}, "resources.memory.model", ""),
        ({}, "resources.memory.model", "required"),
        ("40QB", "resources.memory", "40QB"),
    ],
)
def test_memory_that_cannot_be_estimated_is_told(memory, field, said):
    with pytest.raises(SpecError) as raised:
        parse_job({"command": "x", "resources": {"memory": memory}})
    assert raised.value.field == field and said in f"{raised.value} {raised.value.args[2]}"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        ("{", "cannot be read"),
        ("[1]", "is not a JSON object"),
        ("{}", "the configuration lacks hidden"),
    ],
)
def test_a_file_of_a_models_numbers_that_holds_none_is_told(tmp_path, content, said):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    (tmp_path / "job.yaml").write_text("{command: x, resources: {any_of: [{memory: {model: config.json}}]}}")
    with pytest.raises(SpecError, match=said):
        load_job(tmp_path / "job.yaml")


def test_a_server_reads_no_file_that_a_job_names():
    spec = parse_job({"command": "x", "resources": {"memory": {"model": "/etc/passwd"}}})
    with pytest.raises(SpecError, match="was not read"):
        spec.to_job("j", 1.0)


@pytest.mark.parametrize("name", [" ", " vision", "a\nb", "x" * 64])
def test_what_cannot_be_a_projects_name_is_refused(name):
    with pytest.raises(SpecError, match="is not a project name") as raised:
        parse_job({"command": "x", "project": name})
    assert raised.value.field == "project"

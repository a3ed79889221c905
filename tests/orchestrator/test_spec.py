import json
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import SpecError, UserError
from orchestrator.core.model import Candidate, Job, Recovery
from orchestrator.spec import JobSpec, job_schema, load_job, parse_job
from orchestrator.spec_parts import Failing
from workers.messages import FAILURES

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
        "ordered": [
            {"accelerators": "nvidia:H100:2..8", "precision": "bf16", "env": {"B": "gpu"}, "arguments": {"lr": 0.2}},
            {"accelerators": "cpu", "nodes": 1, "memory": "1GB", "pool": "cpu", "batch_size": 4},
        ],
    },
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
                environment={"A": "job", "B": "gpu"},
                arguments={"lr": 0.2, "layers": [1, 2]},
            ),
            Candidate(
                kinds=("cpu",),
                pool="cpu",
                memory_bytes=10**9,
                precision="fp32",
                batch_size=4,
                environment={"A": "job", "B": "job"},
                arguments={"lr": 0.1, "layers": [1, 2]},
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
    )  # fmt: skip


def test_recovery_left_out_is_the_default_of_the_core():
    assert parse_job({"entry": "train.py"}).to_job("t", 0.0).recovery == Recovery()
    assert Recovery().lease_s == 10.0


@pytest.mark.parametrize(("written", "means"), [("", 0.0), ("never", -1.0), (30, 30.0), ("1h30m", 5400.0)])
def test_a_hang_is_a_duration_never_or_the_default_rule(written, means):
    spec = parse_job({"entry": "train.py", "recovery": {"hang_after": written}})
    assert spec.to_job("t", 0.0).recovery.hang_after_s == means


def test_the_kinds_of_failure_in_a_spec_are_those_that_nodes_tell():
    assert set(get_args(Failing)) == set(FAILURES)


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
    with pytest.raises(SpecError, match=r"exclusive takes all .* devices of a node, and a number is given as well"):
        parse_job({"command": "x", "resources": {"exclusive": True, **resources}})


def test_a_candidate_of_a_run_job_may_bring_its_own_command():
    resources = {"ordered": [{"accelerators": "nvidia", "command": ["torchrun", "x.py"]}, {"accelerators": "cpu"}]}
    job = parse_job({"command": "python x.py", "resources": resources}).to_job("j", 0)
    assert [c.command for c in job.candidates] == [("torchrun", "x.py"), ("/bin/sh", "-c", "python x.py")]
    assert error({"task": "run", "resources": resources}).field == "command"


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
        ({"resources": {"accelerators": "H100:8", "count": 8}}, "resources.count", "is given twice"),
        ({"resources": {"count": 0}}, "resources.count", "0 devices is no range"),
        ({"resources": {"nodes": 0}}, "resources.nodes", "greater than or equal to 1"),
        ({"resources": {"nodes": "2"}}, "resources.nodes", "must be a valid integer"),
        ({"resources": {"nodes": True}}, "resources.nodes", "must be a valid integer"),
        ({"resources": {"memory": 16}}, "resources.memory", "16 is not a size; write a number and a unit"),
        ({"resources": []}, "resources", "must be a mapping"),
        ({"priority": 1001}, "priority", "less than or equal to 1000"),
        ({"priority": "high"}, "priority", "must be a valid integer"),
        ({"objective": "fast"}, "objective", "valid: any, throughput, cost, finish_time"),
        ({"precision": "fp23"}, "precision", "did you mean 'fp32'?"),
        ({"task": "tarin"}, "task", "did you mean 'train'?"),
        ({"name": "a b"}, "name", "'a b' is no name"),
        ({"name": "../x"}, "name", "is no name"),
        ({"name": "a.b"}, "name", "is no name"),
        ({"name": "x" * 64}, "name", "is no name"),
        ({"entry": "../train.py"}, "entry", "names no function"),
        ({"entry": "/abs/train.py"}, "entry", "names no function"),
        ({"entry": "train.py:"}, "entry", "names no function"),
        ({"entry": "train-it:main"}, "entry", "names no function"),
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
        ({"recovery": {"lease": "1s"}}, "recovery.lease", "1s is too short; write at least 3s"),
        ({"recovery": {"lease": "2s"}}, "recovery.lease", "2s is too short; write at least 3s"),
        ({"recovery": {"hang_after": "1s"}}, "recovery.hang_after", "1s is too short; write at least 5s, or never"),
        ({"recovery": {"hang_after": "often"}}, "recovery.hang_after", "'often' is not a duration"),
        ({"recovery": {"hang_after": "9d"}}, "recovery.hang_after", "9d is longer than 7 days"),
        ({"recovery": {"on_events": {"oom": "again"}}}, "recovery.on_events.oom", "valid: restart, retry, next"),
        ({"recovery": {"on_events": {"memory": "next"}}}, "recovery.on_events.memory", "valid: user, oom, signal"),
        ({"recovery": {"on_events": {"oom": "ignore"}}}, "recovery.on_events", "oom cannot be ignored; write restart"),
        ({"recovery": {"on_events": {"hang": "ignore"}}}, "recovery.on_events", "write `hang_after: never`"),
        ({"recovery": {"on_disconnect": "retry"}}, "recovery.on_disconnect", "valid: restart, wait, stop"),
        ({"recovery": {"cross_vendor": "no"}}, "recovery.cross_vendor", "boolean"),
        ({"recovery": {"retry_exit_codes": [0]}}, "recovery.retry_exit_codes.0", "greater than or equal to 1"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep", "greater than or equal to 1"),
        ({"checkpoint": {"resume_from": "p:../x"}}, "checkpoint.resume_from", "is no checkpoint"),
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
        ({"task": "benchmark", "entry": "m.py"}, "entry", "m.py names no function; write m.py:NAME"),
        ({"task": "run"}, "command", "a run job needs a command"),
        ({"entry": "a.py", "command": "x"}, "command", "is read by run jobs, this one is train; leave it out"),
        ({"task": "run", "command": "x", "entry": "a.py"}, "entry", "this one is run; put it into the command or env"),
        ({"command": "x", "arguments": {"a": 1}}, "arguments", "is read by prepare, train, benchmark jobs"),
        ({"command": "x", "precision": "bf16"}, "precision", "this one is run"),
        ({"command": "x", "checkpoint": {"keep": 1}}, "checkpoint", "is read by train jobs, this one is run"),
        ({"task": "benchmark", "entry": "m:f", "checkpoint": {"keep": 1}}, "checkpoint", "is read by train jobs"),
        ({"task": "prepare", "entry": "m:f", "batch_size": 2}, "batch_size", "is read by train, benchmark jobs"),
        (
            {"command": "x", "resources": {"any_of": [{}, {"batch_size": 2}]}},
            "resources.any_of.1.batch_size",
            "this one is run",
        ),
        (
            {"entry": "a.py", "resources": {"ordered": [{"command": "x"}]}},
            "resources.ordered.0.command",
            "is read by run jobs, this one is train",
        ),
    ],
)
def test_a_field_the_task_does_not_read_is_refused_with_a_sentence(data, field, message):
    raised = error(data)
    assert raised.field == field
    assert message in str(raised)


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

"""Submitting, waiting and following from the command line; the exit code tells how it ended."""

import json
import signal
import subprocess

import pytest

JOB = """
name: from-file
entry: train.py
working_dir: code
env: {LR: 0.1}
resources: {accelerators: "cpu:1"}
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("def train(ctx): ...")
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def submitted(live):
    return [call[1] for call in live.service.calls if call[0] == "submit"]


def test_a_file_is_submitted_with_the_folder_beside_it(here, live, file, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    done = here("submit", str(file))
    assert (done.returncode, done.stdout, done.stderr) == (0, "from-file-000000\n", "")
    (spec,) = submitted(live)
    assert (spec["entry"], spec["working_dir"]) == ("train.py", str(tmp_path / "code"))
    assert len(live.service.packages) == 1


def test_the_command_line_wins_over_the_file(here, live, file):
    here(
        "submit",
        str(file),
        "-n",
        "other",
        "--env",
        "LR=0.2",
        "--env",
        "A=b=c",
        "--accelerators",
        "nvidia:H100:8",
        "--pool",
        "p",
    )
    (spec,) = submitted(live)
    assert (spec["name"], spec["env"]) == ("other", {"LR": "0.2", "A": "b=c"})
    assert spec["resources"] == {"accelerators": "nvidia:H100:8", "pool": "p"}


def test_what_candidates_say_of_pool_and_variables_gives_way_too(here, live, file):
    file.write_text(
        JOB.replace(
            'accelerators: "cpu:1"', "any_of: [{accelerators: cpu, pool: a, env: {LR: 9}}, {accelerators: tpu}]"
        )
    )
    here("submit", str(file), "--env", "LR=0.2", "--pool", "b")
    (spec,) = submitted(live)
    assert spec["resources"]["pool"] == "b"
    assert [c.get("pool") for c in spec["resources"]["any_of"]] == [None, None]
    assert spec["resources"]["any_of"][0]["env"] == {}


def test_a_command_needs_no_file(here, live):
    done = here(
        "submit",
        "--task",
        "run",
        "--accelerators",
        "cpu:1",
        "-n",
        "cmd",
        "--",
        "python",
        "-c",
        "print('a b')",
        "--flag",
    )
    assert done.returncode == 0
    assert submitted(live) == [
        {
            "task": "run",
            "name": "cmd",
            "command": ["python", "-c", "print('a b')", "--flag"],
            "resources": {"accelerators": "cpu:1"},
        }
    ]


def test_an_entry_needs_no_file_either(here, live, file, tmp_path):
    done = here("submit", "--task", "train", "--entry", "train.py:train", "--working-dir", str(tmp_path / "code"))
    assert done.returncode == 0
    assert submitted(live)[0]["entry"] == "train.py:train"


def test_a_dry_run_shows_the_plan_and_submits_nothing(here, live, file):
    done = here("submit", str(file), "--dry-run")
    assert (done.returncode, submitted(live)) == (0, [])
    assert "would start as candidate 1 on cpu-0/cpu [0]" in done.stdout
    assert json.loads(here("submit", str(file), "--dry-run", "-o", "json").stdout)["would_start"]["candidate"] == 0


@pytest.mark.parametrize(
    ("name", "code", "state"), [("fine", 0, "SUCCEEDED"), ("fail", 1, "FAILED"), ("stop", 4, "CANCELLED")]
)
def test_waiting_exits_as_the_job_ended(here, live, name, code, state):
    done = here("submit", "--wait", "--task", "run", "-n", name, "-o", "json", "--", "true")
    assert (done.returncode, json.loads(done.stdout)["state"]) == (code, state)
    said = done.stderr.splitlines()
    assert said[0] == f"submitted {name}-000000"
    assert said[1:2] == ([] if code == 0 else [f"{name}-000000: {state}"])


def test_following_prints_the_log_and_then_how_it_ended(here, live):
    done = here("submit", "-f", "--task", "run", "-n", "fail", "--", "false")
    assert (done.returncode, done.stdout) == (1, "hello from fail\n")
    assert done.stderr.splitlines() == [
        "submitted fail-000000",
        "fail-000000: FAILED",
        "  rank 0 on node cpu-0 (user, exit code 1): ValueError: no",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "error: no job file\n  give one job file, or a command: `polyfleet submit"),
        (["--"], "error: no command\n  give one job file, or a command: `polyfleet submit"),
        (["a.yaml", "b.yaml"], "error: more than one job file: 'a.yaml b.yaml'"),
        (["job.yaml", "--", "x"], "error: a job file, 'job.yaml', and a command after `--`\n  keep one of them"),
        (["--task", "run", "x"], "error: a job file, 'x', and --task, --entry or --working-dir\n"),
        (["absent.yaml"], "error: absent.yaml: No such file or directory\n  name a YAML file"),
        (["--task", "run"], "error: no command"),
        (["--task", "train", "--", "x"], "error: a train job takes no command: 'x'"),
        (["--task", "train"], "error: entry: a train job needs an entry"),
        (["job.yaml", "--entry", "x.py"], "error: a job file, 'job.yaml', and --task, --entry or --working-dir"),
        (["job.yaml", "--env", "LR"], "error: --env 'LR' is not K=V"),
        (["job.yaml", "--env", "RAY_X=1"], "error: env: RAY_X is set by Polyfleet itself"),
        (["job.yaml", "--accelerators", "nvidiaa"], "error: resources.accelerators: unknown accelerator 'nvidiaa'"),
        (["--task", "run", "--accelerators", "tpu:v5p", "--", "x"], "no pool has tpu:v5p\n  kinds here: cpu"),
        (["--task", "train", "--entry", "train.py", "--working-dir", "absent"], "absent does not exist"),
        (["--entry", "train.py"], "error: working_dir: is required: train.py is a file in it"),
        (["--entry", "tain.py", "--working-dir", "code"], "tain.py in {code}\n  did you mean 'train.py'? valid: "),
        (["--entry", "train.py:tain", "--working-dir", "code"], "train.py has no function 'tain'\n  did you mean"),
        (["--", "\udce9"], "error: not UTF-8 text: "),
    ],
    ids=range(19),
)  # fmt: skip
def test_bad_input_is_one_sentence_and_a_remedy_with_exit_code_2(
    here, live, file, tmp_path, monkeypatch, words, message
):
    monkeypatch.chdir(tmp_path)
    done = here("submit", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert message.replace("{code}", str(tmp_path / "code")) in done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert live.service.views == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("entri: x.py", "unknown key 'entri'"),
        ("entry: [1]", "entry: "),
        ("entry: x.py\nworking_dir: absent", "there is no folder"),
        ("entry: x.py\nentry: y.py", "appears twice"),
        ("a: &a [1]\nb: *a", "anchor"),
        ("entry: x.py\n\tworking_dir: .", "not YAML"),
        ("", "is empty"),
        ("accelerators: cpu", "belongs under `resources`"),
    ],
    ids=range(8),
)
def test_a_bad_file_is_named_with_what_is_wrong(here, live, file, tmp_path, text, message):
    file.write_text(text)
    done = here("submit", str(file))
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert str(file) in done.stderr or "working_dir" in done.stderr or "resources" in done.stderr


def test_a_folder_with_a_module_named_like_ours_is_refused(here, live, file, tmp_path):
    (tmp_path / "code" / "cluster.py").write_text("")
    done = here("submit", str(file))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: working_dir: its top-level 'cluster.py' would hide Polyfleet's own package 'cluster'",
        "  rename it, e.g. to 'my_cluster.py', or put it inside a package of yours",
    ]


def test_ctrl_c_leaves_the_job_running_and_says_how_to_go_on(start, live, wait_for):
    live.service.lines["long-000000"] = []
    view = live.service.submit

    def running(spec, package, key):
        return view(spec, package, key) | live.service.views["long-000000"].update(state="RUNNING") or {
            "id": "long-000000"
        }

    live.service.submit = lambda *a: (view(*a), live.service.views["long-000000"].update(state="RUNNING"))[0]
    child = start(
        "submit",
        "--wait",
        "--task",
        "run",
        "-n",
        "long",
        "--",
        "sleep",
        "9",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_for(lambda: sum(call[0] == "job" for call in live.service.calls) > 2)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=20)
    assert (child.returncode, out) == (130, b"")
    assert "long-000000 goes on; `polyfleet logs -f long-000000` follows it" in err.decode()
    assert live.service.views["long-000000"]["state"] == "RUNNING"

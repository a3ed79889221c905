"""Submitting, waiting and following from the command line; the exit code tells how it ended."""

import json
import re
import signal
import subprocess

import pytest

from orchestrator.client import client as http
from orchestrator.code_archives import code_archive
from orchestrator.verbs import jobs

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


def test_a_file_is_submitted_with_the_folder_beside_it(here, live, file, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    done = here("submit", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch("from-file-[0-9a-f]{8}\n", done.stdout)
    (spec,) = live.specs
    assert (spec["entry"], spec["working_dir"]) == ("train.py", str(tmp_path / "code"))
    assert len(list((live.home / "packages").glob("*.zip"))) == 1


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
        "cpu:1",
        "--pool",
        "ipex",
    )
    (spec,) = live.specs
    assert (spec["name"], spec["env"]) == ("other", {"LR": "0.2", "A": "b=c"})
    assert spec["resources"] == {"accelerators": "cpu:1", "pool": "ipex"}


def test_variables_of_a_file_win_over_the_job_file_and_those_typed_over_both(here, live, file, tmp_path):
    file.write_text(JOB.replace("env: {LR: 0.1}", "env: {LR: 0.1, B: job, C: job, D: job}"))
    (tmp_path / "first.env").write_text("B=first\nC=first\n")
    (tmp_path / "second.env").write_text("# of this run\nexport C='second  one'\nLR=9\n")
    files = ("--env-file", str(tmp_path / "first.env"), "--env-file", str(tmp_path / "second.env"))
    done = here("submit", str(file), *files, "--env", "LR=0.2")
    assert done.returncode == 0, done
    (spec,) = live.specs
    assert spec["env"] == {"LR": "0.2", "B": "first", "C": "second  one", "D": "job"}
    (tmp_path / "second.env").write_text("C=1\nLR\n")
    done = here("submit", str(file), *files)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: {tmp_path / 'second.env'}, line 2: not of the form KEY=VALUE" in done.stderr


def test_what_git_ignores_stays_behind_and_is_told_in_one_line(here, live, file, tmp_path):
    (tmp_path / "code" / ".gitignore").write_text("*.npy\n")
    (tmp_path / "code" / ".git").mkdir()
    (tmp_path / "code" / "data.npy").write_text("")
    done = here("submit", str(file))
    assert done.returncode == 0
    assert done.stderr == (
        "left out of the submitted folder, because .gitignore names them: 1 file (data.npy)."
        " To send data.npy anyway, write !/data.npy into .polyfleetignore\n"
        "left out of the submitted folder, because they are not part of the code: .git/."
        " .git is never sent: a job that needs it clones the repository\n"
    )


def test_what_candidates_say_of_pool_and_variables_gives_way_too(here, live, file):
    file.write_text(
        JOB.replace(
            'accelerators: "cpu:1"', "any_of: [{accelerators: cpu, pool: cpu, env: {LR: 9}}, {accelerators: tpu}]"
        )
    )
    here("submit", str(file), "--env", "LR=0.2", "--pool", "xla")
    (spec,) = live.specs
    assert spec["resources"]["pool"] == "xla"
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
    assert live.specs == [
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
    assert live.specs[0]["entry"] == "train.py:train"


def test_an_offer_shows_where_a_job_could_run_and_submits_nothing(here, live, file):
    done = here("offer", str(file))
    assert (done.returncode, done.stderr, live.specs) == (0, "", [])
    header, first, *others = (re.split(r"  +", line) for line in done.stdout.splitlines())
    assert header[:6] == ["CHOSEN", "CANDIDATE", "POOL", "RESOURCES", "WAIT", "SPEED"]
    assert first[:6] == ["✓", "1", "cpu", "1 × cpu", "now", "unmeasured"]
    assert [row[2:5] for row in others] == [["ipex", "1 × cpu:ipex", "now"]]
    assert list((live.home / "packages").glob("*.zip")) == []
    told = json.loads(here("offer", "--accelerators", "tpu:v5p", "-o", "json", "--", "true").stdout)
    assert {offer["wait"] for offer in told["offers"]} == {"never here"}
    assert told["impossible"] == "no pool has tpu:v5p; kinds here: cpu, cpu:ipex, tpu:emulated"
    done = here("offer", "--accelerators", "nvidiaa", "--", "true")
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: resources.accelerators: unknown" in done.stderr and "did you mean" in done.stderr


def test_an_offer_tells_what_was_measured_of_the_folder(here, live, file, tmp_path, recorded):
    content_sha = code_archive.pack(tmp_path / "code", "train", tmp_path / "code.zip").content_sha
    live.service.store.benchmarks.append("bench-1", {"line": "started", "run": "bench-1", "content_sha": content_sha})
    for line in recorded.benchmark_lines():
        changed = {"case": "user/make/train", "mode": "train"} if line["line"] == "result" else {}
        live.service.store.benchmarks.append("bench-1", line | changed)
    told = json.loads(here("offer", str(file), "--accelerators", "any", "-o", "json").stdout)["offers"]
    speeds = {offer["kind"]: offer["items_per_s"] for offer in told}
    assert (speeds["cpu"], speeds["tpu:emulated"]) == (pytest.approx(6400, rel=0.01), pytest.approx(3200, rel=0.01))
    assert speeds["cpu:ipex"] is None
    sentences = {offer["kind"]: offer["speed"] for offer in told}
    assert sentences["cpu"].startswith("measured 6,3") and sentences["cpu"].endswith("in bench-1")


def test_a_dry_run_shows_the_plan_and_submits_nothing(here, live, file):
    done = here("submit", str(file), "--dry-run")
    assert (done.returncode, live.specs) == (0, [])
    assert "would start as candidate 1 on " in done.stdout
    assert json.loads(here("submit", str(file), "--dry-run", "-o", "json").stdout)["would_start"]["candidate"] == 1


@pytest.mark.parametrize(("line", "code", "state"), [("true", 0, "SUCCEEDED"), ("echo no >&2; exit 3", 1, "FAILED")])
def test_waiting_exits_as_the_job_ended(here, live, line, code, state):
    done = here("submit", "--wait", "--task", "run", "-n", "job", "-o", "json", "--", "sh", "-c", line)
    view = json.loads(done.stdout)
    assert (done.returncode, view["state"]) == (code, state)
    said = done.stderr.splitlines()
    assert said[0] == f"submitted {view['id']}"
    assert said[1:2] == ([] if code == 0 else [f"{view['id']}: {state}"])


def test_waiting_for_a_job_that_is_cancelled_is_exit_code_4(live, start, wait_for):
    child = start("submit", "--wait", "-n", "long", "--", "sleep", "60", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: live.specs)
    with http.connect(start=False) as client:
        client.jobs.cancel("long")
    out, _ = child.communicate()
    assert (child.returncode, b"CANCELLED" in out) == (4, True)


def test_following_prints_the_log_and_then_how_it_ended(here, live):
    done = here("submit", "-f", "-n", "fail", "--", "sh", "-c", "echo hello from fail; exit 3")
    assert (done.returncode, done.stdout) == (1, "hello from fail\n")
    (job,) = jobs.list_(live.hub).rows
    assert done.stderr.splitlines() == [
        f"submitted {job['id']}",
        f"{job['id']}: FAILED",
        f"  rank 0 on node {job['nodes'][0]} (user, exit code 3): {job['reason']}",
    ]


def test_several_jobs_are_submitted_together_or_not_at_all(here, live, file, tmp_path):
    several = tmp_path / "several.yaml"
    several.write_text("name: one\ncommand: 'true'\n---\nname: two\ncommand: 'true'\nresources: {pool: xla}\n")
    done = here("submit", str(several), str(file), str(file), "--wait", "--env", "A=b")
    assert [line.rpartition("-")[0] for line in done.stdout.splitlines()] == ["one", "two", "from-file", "from-file"]
    assert [spec["env"]["A"] for spec in live.specs] == ["b"] * 4
    assert len(list((live.home / "packages").glob("*.zip"))) == 1
    several.write_text("name: one\ncommand: 'true'\n---\ncommand: 'true'\nresources: {accelerators: 'tpu:v5p'}\n")
    done = here("submit", str(several))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: jobs.1.resources: no pool has tpu:v5p; kinds here: cpu")
    assert len(live.specs) == 4
    several.write_text("command: 'true'\n---\nentri: x.py\n")
    assert "several.yaml, job 2)" in here("submit", str(several)).stderr


def test_a_key_makes_a_submission_count_once(here, live):
    words = ("submit", "--key", "mine", "-n", "once", "-o", "json", "--", "true")
    first = here(*words)
    assert first.returncode == 0
    assert here(*words).stdout == first.stdout
    assert len(live.specs) == 1
    other = here("submit", "--key", "mine", "-n", "other", "--", "true")
    assert (other.returncode, other.stdout) == (2, "")
    assert "the idempotency key 'mine' was used with another request" in other.stderr


def test_a_key_makes_work_on_a_checkpoint_count_once(here, live, checkpoint):
    def copied(name, key):
        return here("checkpoint", "copy", checkpoint, f"ipex:{name}", "--key", key, "-o", "json")

    first, again, other = copied("kept", "k"), copied("kept", "k"), copied("kept", "another")
    assert (first.returncode, again.returncode, other.returncode) == (0, 0, 0)
    assert first.stdout == again.stdout != other.stdout
    refused = copied("elsewhere", "k")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "the idempotency key 'k' was used with another request" in refused.stderr
    assert not (live.home / "storage" / "ipex" / "elsewhere").exists()
    assert here("checkpoint", "pin", checkpoint, "--key", "p").returncode == 0
    assert "was used with another request" in here("checkpoint", "pin", checkpoint, "--remove", "--key", "p").stderr


def test_without_a_fleet_a_job_is_accepted_and_says_that_it_waits(here, live):
    live.fleet.down(live.service)
    done = here("submit", "-n", "waits", "--", "true")
    assert (done.returncode, done.stdout.startswith("waits-")) == (0, True)
    assert ": no fleet is up; the job waits, checked against the fleet of 2" in done.stderr
    refused = here("submit", "--accelerators", "tpu:v5p", "--", "true")
    assert (refused.returncode, "no pool has tpu:v5p; kinds here: cpu" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "error: no job file\n  name a job file, or write a command: `polyfleet submit"),
        (["--"], "error: no command\n  name a job file, or write a command: `polyfleet submit"),
        (["a.yaml", "job.yaml"], "error: a.yaml: No such file or directory"),
        (["job.yaml", "--", "x"], "error: both a job file, 'job.yaml', and a command after `--` are present"),
        (["job.yaml", "job.yaml", "-f"], "error: --follow follows only one job; there are 2\n  submit them"),
        (["--task", "run", "x"], "error: --task, --entry, --working-dir, --launch and --checkpoint cannot be"),
        (["--checkpoint", "../a.pt", "--", "x"], "error: checkpoint.path: path '../a.pt' is not inside the job"),
        (["absent.yaml"], "error: absent.yaml: No such file or directory\n  name a YAML file"),
        (["--task", "run"], "error: no command"),
        (["--task", "train", "--", "x"], "error: a train job cannot have a command: 'x'"),
        (["--task", "train"], "error: entry: a train job needs an entry"),
        (["job.yaml", "--entry", "x.py"], "error: --task, --entry, --working-dir, --launch and --checkpoint cannot be"),
        (["job.yaml", "--env", "LR"], "error: --env 'LR' is not of the form K=V"),
        (["job.yaml", "--env", "RAY_X=1"], "error: env: RAY_X is set by Polyfleet itself"),
        (["job.yaml", "--accelerators", "nvidiaa"], "error: resources.accelerators: unknown accelerator 'nvidiaa'"),
        (["--task", "run", "--accelerators", "tpu:v5p", "--", "x"], "no pool has tpu:v5p; kinds here: cpu"),
        (["--task", "train", "--entry", "train.py", "--working-dir", "absent"], "absent does not exist"),
        (["--entry", "train.py"], "error: working_dir: is required: train.py is a file in it"),
        (["--entry", "tain.py", "--working-dir", "code"], "tain.py in {code}\n  did you mean 'train.py'? valid: "),
        (["--entry", "train.py:tain", "--working-dir", "code"], "train.py has no function 'tain'\n  did you mean"),
        (["--", "\udce9"], "error: not UTF-8 text: "),
    ],
    ids=range(21),
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
    assert live.specs == []


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
    words = ("submit", "--wait", "-n", "long", "--", "sleep", "60")
    child = start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    said = iter(child.stderr.readline, b"")
    assert any(line.startswith(b"submitted long-") for line in said)  # on a slow machine after lines of progress
    wait_for(lambda: [job["state"] for job in jobs.list_(live.hub).rows] == ["RUNNING"])
    child.send_signal(signal.SIGINT)
    out, err = child.communicate()
    assert (child.returncode, out) == (130, b""), err.decode()
    (job,) = jobs.list_(live.hub).rows
    assert f"Job {job['id']} has not ended. Follow it with `polyfleet logs -f {job['id']}`" in err.decode()
    assert job["state"] == "RUNNING"


def test_a_command_that_names_a_file_that_is_not_sent_gets_a_hint(here, live, file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "code")
    hint = "the command names train.py, but no files are sent; add --working-dir . to send this folder\n"
    command = ("--", "python", "train.py")
    for words, message in (
        (command, hint),
        (("--working-dir", ".", *command), ""),
        (("--data", "train.py:train.py", *command), ""),
        (("--", "python", "absent.py"), ""),
    ):
        done = here("submit", *words)
        assert (done.returncode, done.stderr) == (0, message), done

"""`polyfleet run`: as if the command ran here, with its output, its exit code and a question at Ctrl-C."""

import re
import signal
import subprocess

import pytest

from orchestrator.cli.jobs.job_arguments import find_needed_file
from orchestrator.client import client as http
from orchestrator.verbs import jobs


@pytest.mark.parametrize(
    ("line", "code", "state"), [("echo out; echo err >&2", 0, "SUCCEEDED"), ("echo no; exit 3", 1, "FAILED")]
)
def test_it_prints_the_log_and_ends_as_the_job_ended(here, live, line, code, state):
    done = here("run", "-n", "it", "--", "sh", "-c", line)
    (job,) = jobs.list_(live.hub).rows
    assert (done.returncode, job["state"]) == (code, state)
    assert sorted(done.stdout.split()) == sorted(re.findall(r"echo (\w+)", line))
    said = done.stderr.splitlines()
    assert said[:2] == [f"submitted {job['id']}", f"{job['id']}: {state}"]


def test_a_job_that_is_cancelled_is_exit_code_4(live, start, wait_for):
    child = start("run", "-n", "long", "--", "sleep", "60", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: live.specs)
    with http.connect(start=False) as client:
        client.jobs.cancel("long")
    _, err = child.communicate()
    assert (child.returncode, b": CANCELLED" in err) == (4, True)


def test_it_takes_the_options_of_submit(here, live, tmp_path):
    (tmp_path / "x.env").write_text("A=1\nB=2\n")
    files = ("--env-file", str(tmp_path / "x.env"), "--env", "B=3")
    words = (*files, "--accelerators", "cpu:1", "--pool", "cpu", "-n", "o")
    assert here("run", *words, "--", "true").returncode == 0
    assert live.specs == [
        {
            "name": "o",
            "task": "run",
            "command": ["true"],
            "env": {"A": "1", "B": "3"},
            "resources": {"accelerators": "cpu:1", "pool": "cpu"},
        }
    ]


def test_detached_it_prints_the_id_and_how_to_follow(here, live):
    done = here("run", "--detach", "-n", "far", "--", "true")
    assert (done.returncode, bool(re.fullmatch("far-[0-9a-f]{8}\n", done.stdout))) == (0, True)
    job = done.stdout.strip()
    assert done.stderr == f"Follow it with `polyfleet logs -f {job}`, end it with `polyfleet cancel {job}`\n"


def test_a_command_that_names_a_file_here_takes_the_folder_along(here, live, tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "hello.sh").write_text("echo hello from $(basename $0)\n")
    monkeypatch.chdir(tmp_path / "code")
    done = here("run", "--", "sh", "hello.sh")
    assert (done.returncode, done.stdout) == (0, "hello from hello.sh\n"), done
    assert "uploading the current folder, because the command names hello.sh" in done.stderr
    assert here("run", "--working-dir", "", "--", "sh", "hello.sh").returncode == 1
    assert [spec.get("working_dir", "") for spec in live.specs] == [str(tmp_path / "code"), ""]


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["python", "train.py"], "train.py"),
        (["python", "-u", "./train.py", "--lr", "1"], "./train.py"),
        (["python", "-m", "pkg.main"], "pkg.main"),
        (["python", "-m", "train"], "train"),
        (["python", "-m", "json.tool"], ""),
        (["python", "-c", "print(1)"], ""),
        (["pkg"], ""),
        (["cat", "/etc/passwd", "../train.py", "~/train.py", ""], ""),
        (["python", "-c", "x" * 5000], ""),
        (["echo", "a\0b"], ""),
    ],
)
def test_which_commands_need_the_folder(tmp_path, command, named):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "pkg").mkdir()
    assert find_needed_file(command, tmp_path) == named


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "error: no command\n  write it after `--`: `polyfleet run --pool cpu -- python train.py`"),
        (["--"], "error: no command\n"),
        (
            ["python", "train.py"],
            "error: there is no job file 'python'\n  write a command after `--`: `polyfleet run --",
        ),
        (["two.yaml"], "error: `run` follows only one job; there are 2\n"),
        (["two.yaml", "--", "x"], "error: both a job file, 'two.yaml', and a command after `--` are present\n"),
        (["--env-file", "absent", "--", "x"], "error: absent: no such file\n"),
    ],
)
def test_bad_input_is_one_sentence_with_exit_code_2(here, live, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.yaml").write_text("command: 'true'\n---\ncommand: 'true'\n")
    done = here("run", *words)
    assert (done.returncode, done.stdout, live.specs) == (2, "", [])
    assert done.stderr.startswith(message)


def test_without_a_terminal_ctrl_c_leaves_the_job_running_and_says_how_to_go_on(start, live, talking, wait_for):
    words = ("run", "-n", "talks", "--working-dir", "", "--", *talking.spec["command"])
    child = start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    talking.say("hello\n")
    assert child.stdout.readline() == b"hello\n"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate()
    (job,) = jobs.list_(live.hub).rows
    assert (child.returncode, job["state"]) == (130, "RUNNING")
    assert f"Job {job['id']} has not ended. Follow it with `polyfleet logs -f {job['id']}`" in err.decode()


@pytest.fixture
def followed(command, live, talking, at_a_terminal):
    """`run` at a terminal, following a job that has said `hello`."""
    terminal = at_a_terminal([*command, "run", "-n", "talks", "--working-dir", "", "--", *talking.spec["command"]])
    talking.say("hello\n")
    terminal.shows(b"hello")
    return terminal


def test_ctrl_c_asks_and_following_goes_on_without_losing_a_line(live, talking, followed):
    followed.type(b"\x03")
    followed.shows(b"continue following (Enter)? ")
    talking.say("meanwhile\n")
    followed.type(b"\n")
    followed.shows(b"meanwhile\r\n")
    talking.say("later\n")
    followed.shows(b"later\r\n")
    talking.end()
    assert followed.code() == 0
    assert (followed.seen.count(b"hello"), followed.seen.count(b"meanwhile")) == (0, 0)


def test_ctrl_c_and_c_cancels_the_job(live, followed):
    followed.type(b"\x03")
    followed.shows(b"? ")
    followed.type(b"c\n")
    assert followed.code() == 4
    (job,) = jobs.list_(live.hub).rows
    assert job["state"] == "CANCELLED"


@pytest.mark.parametrize("answer", [b"k\n", b"\x03"], ids=["k", "a second Ctrl-C"])
def test_ctrl_c_and_k_or_ctrl_c_again_leave_it_running(live, followed, answer):
    followed.type(b"\x03")
    followed.shows(b"? ")
    followed.type(answer)
    assert followed.code() == 130
    (job,) = jobs.list_(live.hub).rows
    assert job["state"] == "RUNNING"
    assert f"polyfleet logs -f {job['id']}".encode() in followed.seen

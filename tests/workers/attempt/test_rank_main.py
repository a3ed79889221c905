import errno
import hashlib
import json
import os
import subprocess
import sys
import zipfile

import pytest

from cluster.errors import UserError
from workers.attempt.supervision import outcome
from workers.errors import AttemptReplaced, NonFiniteValue, OutOfDeviceMemory
from workers.protocol.folders import read_json
from workers.tasks import rank_main


def caught(run):
    try:
        run()
    except BaseException as e:
        return rank_main.failure_record(e, 0)
    raise AssertionError("nothing was raised")


def package(node, tmp_path, text):
    """Puts an archive with train.py on the node; returns its digest."""
    with zipfile.ZipFile(tmp_path / "sent.zip", "w") as z:
        z.writestr("train.py", text)
    data = (tmp_path / "sent.zip").read_bytes()
    node.packages.put(hashlib.sha256(data).hexdigest(), 0, data, True)
    return hashlib.sha256(data).hexdigest()


def test_a_task_runs_in_its_folder_and_returns_its_result(node, tmp_path):
    text = "import os\ndef train(ctx):\n    return {'folder': os.path.basename(os.getcwd()), 'x': ctx.arguments['x']}\n"
    sha = package(node, tmp_path, text)
    node.start(task="train", command=(), entry="train.py:train", code_archive=sha, arguments={"x": 1.5})
    ended = node.outcome()
    assert ended["state"] == "succeeded", node.text()
    assert ended["result"]["returned"] == {"folder": "0", "x": 1.5}


def test_a_users_exception_keeps_the_users_frames_and_loses_ours(node, tmp_path):
    text = "def train(ctx):\n    return divide(ctx)\n\ndef divide(ctx):\n    return 1 / 0\n"
    node.start(task="train", command=(), entry="train.py:train", code_archive=package(node, tmp_path, text))
    ended = node.outcome()
    failure = ended["failure"]
    assert (ended["state"], failure["kind"], failure["exit_code"], failure["node"]) == ("failed", "user", 1, "n0")
    assert failure["message"] == "ZeroDivisionError: division by zero"
    frames = [line for line in failure["traceback"].splitlines() if line.startswith("  File ")]
    assert [frame.rpartition(" ")[2] for frame in frames] == ["train", "divide"]
    assert f"err {failure['message']}" in node.text()


def test_an_error_of_ours_keeps_every_frame(tmp_path):
    environ = {**os.environ, "POLYFLEET_ATTEMPT_DIR": str(tmp_path), "RANK": "0"}
    ended = subprocess.run(
        [sys.executable, "-m", "workers.tasks.rank_main"], env=environ, capture_output=True, text=True
    )
    failure = read_json(tmp_path / "failure-0.json")
    assert (ended.returncode, failure["kind"]) == (1, "internal")
    assert "rank_main.py" in failure["traceback"]
    assert failure["traceback"] in ended.stderr


def test_a_mistake_we_explain_needs_no_traceback(tmp_path):
    def ours():
        raise UserError("no such file: train.py", "check the entry")

    failure = caught(ours)
    assert failure["message"] == "no such file: train.py; check the entry"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfDeviceMemory("cuda:0", 2 << 30, 1 << 30),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("RESOURCE_EXHAUSTED: Attempting to allocate 4.00G"),
        type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory."),
    ],
)
def test_running_out_of_memory_is_told_apart(error):
    def fails():
        raise error

    assert caught(fails)["kind"] == "oom"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("x"), "user"),
        (MemoryError(), "oom"),
        (OSError(errno.ENOSPC, "No space left on device"), "storage"),
        (NonFiniteValue("loss", 3), "nan"),
        (AttemptReplaced("this attempt was replaced and cannot save: its lease ended 1 s ago", "stop it"), "lost"),
    ],
)
def test_the_supervisor_accepts_each_kind_that_a_rank_reports(error, kind):
    def fails():
        raise error

    rank = outcome.FailedRank(0, "n0", 1, 1, caught(fails), "", False, "", 0)
    assert outcome._reported_failure(rank).kind == kind


@pytest.mark.parametrize(("code", "exit_code"), [(None, 0), (0, 0), (3, 3), ("no data", 1)])
def test_the_code_of_sys_exit_is_respected(code, exit_code, capsys):
    assert rank_main._exit_code(SystemExit(code)) == exit_code
    assert capsys.readouterr().err == ("no data\n" if code == "no data" else "")


def test_a_result_json_cannot_hold_is_the_users_to_mend():
    with pytest.raises(UserError, match="cannot be written as JSON"):
        rank_main._check_result({"model": object()})


def test_the_cause_of_an_exception_is_told_without_our_frames():
    def fails():
        try:
            json.loads("{")
        except ValueError as e:
            raise KeyError("loss") from e

    told = caught(fails)["traceback"]
    assert "JSONDecodeError" in told
    assert "direct cause" in told


def test_a_rank_asked_for_its_stacks_tells_them_and_survives_the_question_also_while_its_interpreter_ends(tmp_path):
    code = f"""
import faulthandler, os
from pathlib import Path
from workers.tasks import rank_main
rank_main._register_stacks(Path({str(tmp_path / "stacks")!r}))
os.kill(os.getpid(), rank_main.SIGNAL)
faulthandler.unregister(rank_main.SIGNAL)  # as the interpreter does at its end
os.kill(os.getpid(), rank_main.SIGNAL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert 'File "<string>", line 6 in <module>' in (tmp_path / "stacks").read_text()

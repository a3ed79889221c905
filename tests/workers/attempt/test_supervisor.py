import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from patience import LIMIT_S

from workers.attempt import folder_setup
from workers.attempt.supervision import supervisor_handle
from workers.protocol import lease
from workers.protocol.folders import read_json

SLEEP = "import time; time.sleep(600)"
# A daemon as the book says: fork, setsid, fork. It writes its pid and closes its outputs.
DAEMON = """
import os, time
def daemon(path):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open(path, "w").write(str(os.getpid()))
            for fd in (0, 1, 2):
                os.close(fd)
            time.sleep(600)
        os._exit(0)
    os.wait()
    while not (os.path.exists(path) and os.path.getsize(path)):
        time.sleep(0.01)
"""
SAVES = """
import json, os, signal, sys, time
def save(*_):
    with open(os.environ["POLYFLEET_ATTEMPT_DIR"] + "/events.jsonl", "a") as f:
        f.write(json.dumps({"t": time.time(), "rank": 0, "type": "note", "preempted": True}) + "\\n")
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_command_that_ends_with_zero_succeeds(node):
    node.start(command=("sh", "-c", "echo hello; echo oops >&2"))
    ended = node.outcome()
    assert (ended["state"], ended["exit_codes"], ended["failure"]) == ("succeeded", {"0": 0}, None)
    assert sorted(node.text()) == ["err oops", "out hello"]


def test_lines_are_stamped_with_utc_time_to_the_microsecond(node):
    node.start(command=("echo", "hello"))
    node.outcome()
    stamp = node.folder().log(0).read_text().split(" ")[0]
    assert len(stamp) == len("2026-11-20T23:14:53.123456Z")
    assert stamp.endswith("Z")


def test_ranks_of_a_command_get_torchruns_variables_and_a_folder_for_all(node):
    code = (
        "import os; v = os.environ; print(v['RANK'], v['LOCAL_RANK'], v['WORLD_SIZE'], os.path.basename(os.getcwd()))"
    )
    node.python("j", code, launch="ranks", ranks=2, world_size=4, first_rank=2, devices=(0, 1))
    assert node.outcome()["exit_codes"] == {"2": 0, "3": 0}
    assert [node.text(rank=2), node.text(rank=3)] == [["out 2 0 4 2"], ["out 3 1 4 2"]]


def test_an_exit_code_fails_the_attempt_with_the_last_line_of_stderr(node):
    node.start(command=("sh", "-c", "echo step 1; echo disk on fire >&2; exit 3"))
    failure = node.outcome()["failure"]
    assert failure == {
        "rank": 0, "node": "n0", "kind": "user", "message": "rank 0 ended with exit code 3: disk on fire",
        "traceback": "", "exit_code": 3,
    }  # fmt: skip


def test_a_command_that_does_not_exist_says_so(node):
    node.start(command=("no-such-program", "x"))
    failure = node.outcome()["failure"]
    assert (failure["kind"], failure["exit_code"]) == ("start", 127)
    assert failure["message"] == "rank 0 could not start 'no-such-program': No such file or directory"


def test_kill_9_of_one_rank_stops_the_gang(node, is_alive):
    code = f"import os; open('pid-' + os.environ['POLYFLEET_RANK'], 'w').write(str(os.getpid())); {SLEEP}"
    node.python("j", code, ranks=2, world_size=2, devices=(0, 1))
    pids = [int(node.until_file(node.folder().work(0) / f"pid-{rank}")) for rank in (0, 1)]
    os.kill(pids[1], signal.SIGKILL)
    ended = node.outcome()
    assert (ended["state"], ended["exit_codes"]) == ("failed", {"0": -9, "1": -9})
    assert (ended["failure"]["rank"], ended["failure"]["kind"]) == (1, "signal")
    assert "rank 1 was killed by SIGKILL" in ended["failure"]["message"]
    assert not any(is_alive(pid) for pid in pids)


def test_a_daemon_that_a_rank_leaves_behind_dies_with_the_attempt(node, tmp_path, is_alive):
    node.python("j", DAEMON + f"daemon({str(tmp_path / 'pid')!r})")
    assert node.outcome()["state"] == "succeeded"
    assert not is_alive(node.until_file(tmp_path / "pid"))


def test_a_daemon_that_wiped_its_environment_dies_too(node, tmp_path, is_alive):
    script = f"echo $$ > {tmp_path}/pid; exec sleep 600"
    node.start(
        command=(
            "sh",
            "-c",
            f"env -i setsid sh -c '{script}' >/dev/null 2>&1 & while ! test -s {tmp_path}/pid; do :; done",
        )
    )
    assert node.outcome()["state"] == "succeeded"
    assert not is_alive(node.until_file(tmp_path / "pid"))


def test_a_lease_that_passes_kills_everything(node, tmp_path, is_alive, monkeypatch):
    monkeypatch.setattr(supervisor_handle, "LEASE_MARGIN_S", LIMIT_S)  # the agent leaves it to the supervisor
    node.python("j", DAEMON + f"daemon({str(tmp_path / 'pid')!r}); {SLEEP}")
    daemon = node.until_file(tmp_path / "pid")
    lease.write(node.folder().lease, 0.5)
    ended = node.outcome()
    assert (ended["state"], ended["exit_codes"]) == ("lost", {"0": -9})
    failure = ended["failure"]
    assert (failure["rank"], failure["node"], failure["kind"], failure["exit_code"]) == (0, "n0", "lost", None)
    assert failure["message"] == "its lease expired: neither the server nor a fence could be reached"
    assert not is_alive(daemon)


def test_a_supervisor_that_was_frozen_past_its_lease_kills_its_tree_when_it_thaws(node, is_alive):
    node.python("j", f"import os; open('pid', 'w').write(str(os.getpid())); {SLEEP}")
    pid = node.until_file(node.folder().work(0) / "pid")
    os.kill(node.supervisor_pid(), signal.SIGSTOP)
    lease.write(node.folder().lease, -1.0)  # its record has milliseconds, so 0.0 may end after now
    assert is_alive(pid)
    node.attempts.renew()
    os.kill(node.supervisor_pid(), signal.SIGCONT)
    assert node.outcome()["state"] == "lost"
    assert not is_alive(pid)


def test_preempt_lets_a_rank_save_and_is_told_from_success(node):
    node.python("j", SAVES)
    node.until_printed("ready")
    node.attempts.stop("j", 1, "preempt")
    ended = node.outcome()
    assert (ended["state"], ended["exit_codes"]) == ("preempted", {"0": 0})
    assert node.text()[-1] == "out saved"


@pytest.mark.parametrize(
    ("last", "state"),
    [
        ("pass", "preempted"),
        ("open(os.environ['POLYFLEET_ATTEMPT_DIR'] + '/result.json', 'w').write('{}')", "succeeded"),
        ("note({'t': 0, 'rank': 0, 'type': 'note', 'done': True})", "succeeded"),
    ],
)
def test_a_command_that_ends_with_zero_when_preempted_has_not_finished_unless_it_says_so(node, last, state):
    code = f"""
import json, os, signal, sys, time
def note(told):
    open(os.environ["POLYFLEET_ATTEMPT_DIR"] + "/events.jsonl", "a").write(json.dumps(told) + "\\n")
def stop(*_):
    {last}
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
{SLEEP}
"""
    node.python("j", code)
    node.until_printed("ready")
    node.attempts.stop("j", 1, "preempt")
    ended = node.outcome()
    assert (ended["state"], ended["exit_codes"], ended["failure"]) == (state, {"0": 0}, None)


@pytest.mark.parametrize("form", ["words", "exec", "line", "script"])
@pytest.mark.parametrize("finished", [False, True])
def test_a_command_that_saves_and_ends_with_zero_counts_the_same_however_it_is_written(node, tmp_path, form, finished):
    mark = "open(os.environ['POLYFLEET_ATTEMPT_DIR'] + '/result.json', 'w').write('{}')" if finished else ""
    (tmp_path / "save.py").write_text(f"""
import os, signal, sys
def stop(*_):
    {mark or 'print("saved", flush=True)'}
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
signal.pause()
""")
    words = (sys.executable, str(tmp_path / "save.py"))
    line = shlex.join(words)
    (tmp_path / "run.sh").write_text(f"set -e\n{line}\necho wrapper-done\n")
    shell = {"exec": f"exec {line}", "line": f"{line}; true", "script": f"bash {shlex.quote(str(tmp_path))}/run.sh"}
    node.start(command=words if form == "words" else ("/bin/sh", "-c", shell[form]))
    node.until_printed("ready")
    node.attempts.stop("j", 1, "preempt")
    says_so = finished and form in ("words", "exec")  # a shell around it ends by the signal, not with 0
    assert node.outcome()["state"] == ("succeeded" if says_so else "preempted")


@pytest.mark.parametrize("form", ["words", "exec", "line", "script"])
@pytest.mark.parametrize(
    ("how", "state"), [("cancel", "cancelled"), ("fence", "fenced"), ("notice", "preempted"), ("shutdown", "preempted")]
)
def test_a_command_that_ends_with_zero_within_its_grace_has_not_finished_whoever_asked(
    node, tmp_path, form, how, state
):
    """A notice is for all attempts of the node; at a shutdown the machine asks the supervisor itself."""
    (tmp_path / "save.sh").write_text("trap 'exit 0' TERM\necho ready\nwhile :; do sleep 0.05; done\n")
    words = ("sh", str(tmp_path / "save.sh"))
    line = shlex.join(words)
    (tmp_path / "run.sh").write_text(f"{line}\n")
    shell = {"exec": f"exec {line}", "line": f"{line}; true", "script": f"bash {shlex.quote(str(tmp_path))}/run.sh"}
    node.start(command=words if form == "words" else ("/bin/sh", "-c", shell[form]))
    node.until_printed("ready")
    if how == "shutdown":
        os.kill(node.supervisor_pid(), signal.SIGTERM)
    else:
        node.attempts.stop("j", 1, "preempt" if how == "notice" else how)
    assert node.outcome()["state"] == state


def test_a_command_that_had_ended_before_it_was_asked_to_stop_has_succeeded(node):
    """Its supervisor is frozen meanwhile: it is asked before it has learned of the end, and the request wakes it."""
    node.start(command=("sh", "-c", "mkfifo gate; echo ready; read line < gate"))
    node.until_printed("ready")
    supervisor, [rank] = psutil.Process(node.supervisor_pid()), psutil.Process(node.supervisor_pid()).children()
    supervisor.suspend()
    (node.folder().work(0) / "gate").write_text("go\n")
    node.until(lambda: rank.status() == psutil.STATUS_ZOMBIE, "the rank has ended")
    node.attempts.stop("j", 1, "preempt")
    ended = node.outcome()
    assert (ended["state"], ended["exit_codes"]) == ("succeeded", {"0": 0})


def test_a_command_that_ended_as_its_whole_machine_got_a_sigterm_has_not_finished(node):
    """Its supervisor learns of the end before it has its own signal: it is frozen, and both wait for it."""
    node.start(command=("sh", "-c", "trap 'exit 0' TERM; echo ready; while :; do sleep 0.05; done"))
    node.until_printed("ready")
    supervisor, [rank] = psutil.Process(node.supervisor_pid()), psutil.Process(node.supervisor_pid()).children()
    supervisor.suspend()
    rank.send_signal(signal.SIGTERM)
    node.until(lambda: rank.status() == psutil.STATUS_ZOMBIE, "the rank has ended")
    supervisor.send_signal(signal.SIGTERM)
    supervisor.resume()
    ended = node.outcome()
    assert (ended["state"], ended["exit_codes"]) == ("preempted", {"0": 0})


def test_code_of_a_task_of_ours_that_exits_with_zero_when_preempted_has_not_finished(node):
    node.train("""
import signal, sys, time
def train(ctx):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # as frameworks do
    print("ready", flush=True)
    time.sleep(600)
""")
    node.until_printed("ready")
    node.attempts.stop("j", 1, "preempt")
    ended = node.outcome()
    assert (ended["state"], ended["exit_codes"]) == ("preempted", {"0": 0})


@pytest.mark.parametrize("after", ["pass", "signal.signal(signal.SIGTERM, before)"])
def test_a_training_whose_own_handler_of_sigterm_makes_it_return_has_not_finished(node, after):
    """Frameworks put back what was there before them once they return."""
    node.train(f"""
import signal, time
def train(ctx):
    asked = []
    before = signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    print("ready", flush=True)
    while not asked:
        time.sleep(0.01)
    {after}
    return {{"saved": True}}
""")
    node.until_printed("ready")
    node.attempts.stop("j", 1, "preempt")
    ended = node.outcome()
    assert (ended["state"], ended["exit_codes"]) == ("preempted", {"0": 0})


def test_a_training_that_returns_although_it_was_asked_to_stop_has_finished(node):
    node.train("""
import time
def train(ctx):
    print("ready", flush=True)
    while not ctx.stop.requested:
        time.sleep(0.01)
    return {"finished": True}
""")
    node.until_printed("ready")
    node.attempts.stop("j", 1, "preempt")
    ended = node.outcome()
    assert (ended["state"], ended["result"]["returned"]) == ("succeeded", {"finished": True})


def test_a_rank_that_ignores_preempt_is_killed_after_its_grace(node):
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); " + SLEEP
    node.python("j", code, grace_s=0.3)
    node.until_printed("ready")
    node.attempts.stop("j", 1, "preempt")
    ended = node.outcome()
    assert (ended["state"], ended["exit_codes"]) == ("preempted", {"0": -9})


def test_what_a_preempted_shell_started_gets_its_grace_too(node, tmp_path):
    saves = f"trap 'echo saving; echo done > {tmp_path}/saved; exit 0' TERM; echo ready; while :; do :; done"
    node.start(command=("sh", "-c", f'sh -c "{saves}"; true'), grace_s=LIMIT_S)
    node.until_printed("ready")
    node.attempts.stop("j", 1, "preempt")
    assert node.outcome()["state"] == "preempted"
    assert (tmp_path / "saved").read_text() == "done\n"


def test_a_command_that_ends_with_an_error_while_it_is_preempted_is_preempted_and_says_why(node):
    code = (
        "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit('no room'))\nprint('ready', flush=True)\n"
        + SLEEP
    )
    node.python("j", code)
    node.until_printed("ready")
    node.attempts.stop("j", 1, "preempt")
    ended = node.outcome()
    assert (ended["state"], ended["failure"]["message"]) == ("preempted", "rank 0 ended with exit code 1: no room")


def test_the_reason_of_a_failed_command_is_its_error_and_not_what_a_launcher_prints_below(node):
    printed = [
        "[rank1]: ValueError: boom",
        "[rank0]: RuntimeError: connection closed",
        "x.ChildFailedError: ",
        "=" * 60,
    ]
    node.python("j", f"import sys; print(*{printed!r}, sep=chr(10), file=sys.stderr); sys.exit(1)")
    assert node.outcome()["failure"]["message"] == "rank 0 ended with exit code 1: ValueError: boom"


def test_a_decorated_training_that_takes_no_context_is_an_error_of_the_user_without_our_frames(node):
    node.train("without = lambda function: lambda: function()\n@without\ndef train(): ...")
    failure = node.outcome()["failure"]
    assert (failure["kind"], failure["traceback"]) == ("user", "")
    assert failure["message"].startswith("train.py:train cannot be called as train(ctx): too many positional arguments")


def test_cancel_ends_even_a_rank_that_ignores_it(node):
    node.start(command=("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"))
    node.until_printed("ready")
    node.attempts.stop("j", 1, "cancel")
    assert node.outcome()["state"] == "cancelled"


def test_cancel_overtakes_a_preemption_that_is_under_way(node):
    node.start(command=("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"), grace_s=600.0)
    node.until_printed("ready")
    node.attempts.stop("j", 1, "preempt")
    node.attempts.stop("j", 1, "cancel")
    node.attempts.stop("j", 1, "preempt")
    assert node.outcome()["state"] == "cancelled"


def test_a_machine_that_shuts_down_preempts(node):
    node.python("j", SAVES)
    node.until_printed("ready")
    os.kill(node.supervisor_pid(), signal.SIGTERM)
    assert node.outcome()["state"] == "preempted"


SIGNALLED = """
import os, signal, sys
from pathlib import Path
from workers.protocol.folders import AttemptFolder, parse
from workers.attempt.supervision.supervisor import Supervisor

def terminate():
    os.kill(os.getpid(), signal.SIGTERM)

path, when = Path(sys.argv[1]), sys.argv[2]
supervisor = Supervisor(AttemptFolder(path), parse(path.name), {})
supervisor.ranks.install_signal_handlers(supervisor.on_signal)
log = supervisor.ranks._log
supervisor.ranks._log = lambda rank: (terminate() if str(rank) == when else None, log(rank))[1]
if when == "before":
    terminate()
supervisor.run()
"""


@pytest.mark.parametrize(("when", "codes"), [("before", {}), ("0", {"0": -15}), ("1", {"0": -15, "1": -15})])
def test_a_machine_that_shuts_down_while_ranks_are_started_preempts_and_asks_each_of_them(node, when, codes):
    """Never a success: a rank that did not run has not done its work."""
    order = node.order(command=("sleep", "600"), ranks=2, world_size=2, devices=(0, 1), grace_s=LIMIT_S)
    node.folder().path.mkdir()
    where = folder_setup.NodeContext("n0", node.packages, None, {"PATH": os.environ["PATH"]})
    folder_setup.create_folder(node.folder(), order, where, 1, lease.now_s())
    command = [sys.executable, "-c", SIGNALLED, str(node.folder().path), when]
    subprocess.run(command, start_new_session=True, check=True)
    ended = read_json(node.folder().outcome)
    assert (ended["state"], ended["exit_codes"], ended["failure"]) == ("preempted", codes, None)


def test_a_rank_that_floods_its_output_can_be_stopped(node):
    node.start(command=("sh", "-c", "yes polyfleet"))
    node.until(lambda: node.folder().log(0).exists() and node.folder().log(0).stat().st_size > 1 << 20, "a flood")
    node.attempts.stop("j", 1, "cancel")
    assert node.outcome()["state"] == "cancelled"


def test_output_just_before_the_end_is_not_lost(node):
    node.python("j", "print('x' * 100_000); print('last', end='')")
    node.outcome()
    assert node.text()[-1] == "out last"


def test_secrets_reach_the_rank_and_no_file_of_the_attempt(node):
    secret = "s3cr3t/with space"
    code = "import os, sys; v = os.environ['HF_TOKEN']; print(v); print(len(v)); sys.exit('bad ' + v)"
    node.python("j", code, secrets={"HF_TOKEN": secret})
    ended = node.outcome()
    assert node.text()[:2] == ["out ***", f"out {len(secret)}"]
    assert ended["failure"]["message"] == "rank 0 ended with exit code 1: bad ***"
    kept = [p for p in node.root.rglob("j.1.0/**/*") if p.is_file()]
    assert not [p for p in kept if secret in p.read_text()]


def test_nobody_sees_secrets_in_the_supervisors_environment_or_arguments(node):
    node.python("j", f"print('ready', flush=True); {SLEEP}", secrets={"HF_TOKEN": "s3cr3t"})
    node.until_printed("ready")
    proc = f"/proc/{node.supervisor_pid()}"
    seen = {name: Path(proc, name).read_bytes() for name in ("environ", "cmdline")}
    assert not [name for name, data in seen.items() if b"s3cr3t" in data]
    assert {v.split(b"=")[0] for v in seen["environ"].split(b"\0") if v} == {b"PATH", b"PYTHONPATH", b"LC_ALL"}


def test_no_token_of_the_agent_reaches_user_code(node, monkeypatch):
    for name in (
        "RAY_AUTH_TOKEN_PATH",
        "RAY_AUTH_TOKEN",
        "RAY_ADDRESS",
        "POLYFLEET_HOME",
        "AWS_SECRET_ACCESS_KEY",
        "HF_TOKEN",
    ):
        monkeypatch.setenv(name, "canary")
    code = "import os; print('\\n'.join(open(f'/proc/{p}/environ').read() for p in ('self', os.getppid())))"
    node.python("j", code)
    node.outcome()
    told = "\n".join(node.text())
    assert "PATH=" in told
    assert "canary" not in told
    assert "RAY_" not in told


def test_a_result_and_a_failure_are_redacted_before_they_are_kept(node):
    code = """
import json, os, sys
d, v = os.environ["POLYFLEET_ATTEMPT_DIR"], os.environ["KEY"]
failure = dict(rank=0, node="", kind="user", message="ValueError: " + v, traceback="line " + v, exit_code=1)
json.dump(failure, open(d + "/failure-0.json", "w"))
sys.exit(1)
"""
    node.python("j", code, secrets={"KEY": "s3cr3t"})
    failure = node.outcome()["failure"]
    assert (failure["message"], failure["traceback"], failure["node"]) == ("ValueError: ***", "line ***", "n0")
    assert not node.folder().failure(0).exists()


def test_the_result_of_rank_0_is_in_the_outcome(node):
    node.python(
        "j", "import os; open(os.environ['POLYFLEET_ATTEMPT_DIR'] + '/result.json', 'w').write('{\"loss\": 0.5}')"
    )
    assert node.outcome()["result"] == {"loss": 0.5}


@pytest.mark.parametrize("content", ["not json", "[1]", ""])
def test_a_result_that_is_no_object_fails_the_attempt(node, content):
    node.python("j", f"import os; open(os.environ['POLYFLEET_ATTEMPT_DIR'] + '/result.json', 'w').write({content!r})")
    ended = node.outcome()
    assert (ended["state"], ended["result"], ended["failure"]["kind"]) == ("failed", {}, "unreadable")
    assert ended["failure"]["message"].startswith("result.json ")


def test_what_befell_a_whole_part_is_told_by_the_first_rank_that_ran_there(node):
    """On the second of two nodes that is not rank 0, which runs elsewhere."""
    code = "import os; open(os.environ['POLYFLEET_ATTEMPT_DIR'] + '/result.json', 'w').write('[1]')"
    node.python("j", code, nodes=2, node_rank=1, first_rank=2, world_size=3)
    failure = node.outcome(node_rank=1)["failure"]
    assert (failure["kind"], failure["rank"], failure["node"]) == ("unreadable", 2, "n0")

"""`polyfleet exec` and `polyfleet shell` beside a real job: streams, exit codes, and how each side's end ends it."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cluster.errors import NotFound
from orchestrator.cli.jobs.execs import EscapeFilter
from orchestrator.client import client as http
from orchestrator.runtime.jobs.exec_relay import ExecRequest
from orchestrator.verbs import jobs


@pytest.fixture
def job(live, talking, wait_for):
    """The id of one that runs until the test lets it end, with a folder, a variable and a secret."""
    secret = live.home / "secret"
    secret.write_text("hunter2-hunter2")
    spec = talking.spec | {"env": {"WHICH": "this"}, "secrets": {"WORD": f"file:{secret}"}}
    with http.connect(live.home, start=False) as client:
        found = client.jobs.submit(spec)["id"]
        wait_for(lambda: client.jobs.show(found)["state"] == "RUNNING")
    return found


def sh(line):
    return "--", "sh", "-c", line


def test_it_runs_in_the_folder_with_the_variables_of_the_rank_and_nothing_of_the_agents(polyfleet, job, live):
    line = "pwd; echo $WHICH $WORD $POLYFLEET_JOB; command -v python; env; echo err >&2"
    done = polyfleet("exec", job, *sh(line), stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (0, "err\n"), done
    where, said, interpreter, *env = done.stdout.splitlines()
    assert where.endswith(f"/{job}.1.0/work/0")
    assert said == f"this hunter2-hunter2 {job}"
    assert interpreter == str(Path(sys.executable).parent / "python")
    assert not [line for line in env if line.startswith(("RAY_", "POLYFLEET_HOME"))]
    assert live.token not in done.stdout


@pytest.mark.parametrize(("line", "code"), [("exit 7", 7), ("kill -9 $$", 137), ("absent-program", 127)])
def test_it_ends_with_the_exit_code_of_the_command(polyfleet, job, line, code):
    assert polyfleet("exec", job, *sh(line), stdin=subprocess.DEVNULL).returncode == code


def test_a_program_that_is_not_there_is_one_sentence(polyfleet, job):
    done = polyfleet("exec", job, "--", "absent-program", stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: cannot start 'absent-program': No such file or directory\n")


def test_input_is_handed_on_and_what_comes_back_is_as_it_was_byte_by_byte(command, job):
    data = os.urandom(3 << 20)
    done = subprocess.run([*command, "exec", job, "--", "cat"], input=data, capture_output=True)
    assert (done.returncode, done.stdout == data, done.stderr) == (0, True, b"")


def test_more_is_written_than_is_fetched_at_a_time_while_input_waits(polyfleet, job):
    done = polyfleet("exec", job, *sh("head -c 3000000 /dev/zero; wc -c"), input=os.urandom(1 << 20))
    assert (done.returncode, done.stdout.strip("\0")) == (0, f"{1 << 20}\n")
    assert len(done.stdout) > 3_000_000


def test_its_arguments_are_never_read_by_a_shell(polyfleet, job):
    done = polyfleet("exec", job, "--", "printf", "%s|", "$HOME", "a b", ";ls", "é", "--rank", stdin=subprocess.DEVNULL)
    assert done.stdout == "$HOME|a b|;ls|é|--rank|"


def test_a_command_that_takes_no_input_gets_the_end_at_once_and_one_that_ends_early_ends(polyfleet, job):
    assert polyfleet("exec", job, "--", "cat", stdin=subprocess.DEVNULL).returncode == 0
    assert polyfleet("exec", job, "--", "true", input=os.urandom(2 << 20)).returncode == 0


def test_what_it_leaves_running_ends_with_it(polyfleet, job, wait_for):
    done = polyfleet("exec", job, *sh("sleep 377 & setsid sleep 377 & echo begun"), stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (0, "begun\n")
    wait_for(lambda: not sleeping("377", "setsid"))


def sleeping(seconds, *_):
    """Those in a session of a command; one that left it by setsid ends with the attempt."""
    found = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", seconds]]
    return [p for p in found if os.getsid(p.pid) != p.pid]


def commands(*words):
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == list(words)]


def test_a_client_that_is_killed_takes_its_command_along(start, job, wait_for):
    child = start("exec", job, "--", "sleep", "378", stdin=subprocess.DEVNULL)
    wait_for(lambda: commands("sleep", "378"))
    child.send_signal(signal.SIGKILL)
    wait_for(lambda: not commands("sleep", "378"))


def test_a_command_that_ignores_the_hangup_is_killed(start, job, wait_for):
    child = start("exec", job, *sh("trap '' HUP; sleep 379"), stdin=subprocess.DEVNULL)
    wait_for(lambda: commands("sleep", "379"))
    child.send_signal(signal.SIGKILL)
    wait_for(lambda: not commands("sleep", "379"))


def test_ctrl_c_ends_the_command_and_not_the_job(start, job, wait_for):
    child = start("exec", job, "--", "sleep", "380", stdin=subprocess.DEVNULL)
    wait_for(lambda: commands("sleep", "380"))
    child.send_signal(signal.SIGINT)
    assert child.wait() == 130
    wait_for(lambda: not commands("sleep", "380"))
    with http.connect(start=False) as client:
        assert client.jobs.show(job)["state"] == "RUNNING"


def test_it_ends_with_the_attempt_whatever_it_does_to_its_environment(start, job, talking, wait_for):
    words = ("--", "env", "-i", "setsid", "-w", "sleep", "381")
    child = start("exec", job, *words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait_for(lambda: commands("sleep", "381"))
    talking.end()
    _, err = child.communicate()
    assert child.returncode == 3
    assert f"error: the command beside {job} was stopped: the attempt has ended, and with it" in err.decode()
    wait_for(lambda: not commands("sleep", "381"))
    with http.connect(start=False) as client:
        assert client.wait(job)["state"] == "SUCCEEDED"


def test_input_given_twice_counts_once_and_output_that_was_lost_is_given_again(live, job):
    relay = live.service.exec_relay
    known = relay.start(live.service.find_run_job(job), ExecRequest(("cat",), takes_input=True))["exec"]
    for _ in range(2):
        assert relay.write(known, 0, b"abc", False) == {"taken": 3, "closed": False}
    first = relay.read(known, 0, 20.0)
    assert (first["pieces"], first["next"]) == ([["stdout", b"abc"]], 1)
    assert relay.read(known, 0, 20.0) == first
    assert relay.write(known, 3, b"", True) == {"taken": 3, "closed": True}
    ended = relay.read(known, 1, 20.0)
    assert (ended["pieces"], ended["ended"], ended["code"]) == ([], True, 0)
    relay.close(known)
    with pytest.raises(NotFound, match="this command has ended"):
        relay.read(known, 2, 1.0)


def test_who_ran_what_is_in_the_servers_log(polyfleet, job, caplog):
    with caplog.at_level(logging.INFO, "orchestrator.runtime.jobs.exec_relay"):
        polyfleet("exec", job, "--", "echo", "a b\nexec 123 by root", stdin=subprocess.DEVNULL)
    begun, ended = (record.getMessage() for record in caplog.records)
    assert f"beside rank 0 of attempt 1 of {job} on " in begun
    assert begun.endswith(": echo 'a b exec 123 by root'") and "\n" not in begun and "@" in begun
    assert ended.endswith(" ended: exit code 0")


def test_where_nothing_runs_it_is_refused_in_one_sentence(here, live, job, talking):
    with http.connect(start=False) as client:
        taken = {"pool": client.jobs.show(job)["pool"]}
        waits = client.jobs.submit({"task": "run", "command": "true", "name": "waits", "resources": taken})["id"]
    for words, code, message in (
        (("exec", "absent", "--", "true"), 2, "error: no job 'absent'\n"),
        (
            ("exec", waits, "--", "true"),
            2,
            f"error: {waits} is not running now: PENDING\n  `polyfleet explain {waits}`",
        ),
        (("exec", job, "--rank", "7", "--", "true"), 2, f"error: {job} has no rank 7\n  its ranks are 0 to 0\n"),
        (("exec", job), 2, "error: no command\n  write it after `--`: `polyfleet exec"),
        (("exec", job, "--"), 2, "error: no command\n"),
        (("shell", job), 2, "error: a shell needs a terminal\n  run one command with `polyfleet exec"),
        (("exec", job, "--", "x" * 40_000), 2, "error: command: "),
        (("exec", job, "--", "a\0b"), 2, "error: command: "),
        (("exec", job, "--", ""), 2, "error: command: "),
    ):
        done = here(*words)
        assert (done.returncode, done.stdout, done.stderr.startswith(message)) == (code, "", True), (words, done)
    talking.end()
    with http.connect(start=False) as client:
        client.wait(job)
    done = here("exec", job, "--", "true")
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, f"error: {job} has ended: SUCCEEDED")


def test_a_node_that_went_away_is_exit_code_3(here, live, job):
    node = jobs.show(live.hub, job)["nodes"][0]
    live.fleet.lose(live.service, node)
    done = here("exec", job, "--", "true")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(f"error: node {node}, where rank 0 of {job} runs, cannot be reached now\n")


def test_no_more_than_eight_run_beside_one_attempt(polyfleet, live, job):
    relay, running = live.service.exec_relay, live.service.find_run_job(job)
    started = [relay.start(running, ExecRequest(("sleep", "382")))["exec"] for _ in range(8)]
    done = polyfleet("exec", job, "--", "true", stdin=subprocess.DEVNULL)
    assert (done.returncode, "8 commands run beside" in done.stderr) == (3, True), done
    for known in started:
        relay.close(known)


@pytest.fixture
def shell(command, job, at_a_terminal):
    return at_a_terminal([*command, "shell", job])


def test_a_shell_is_at_a_terminal_of_its_own_in_the_jobs_folder(live, shell, job):
    shell.shows(b"Enter, then ~. leaves")
    shell.type(b"tty; pwd; echo $WHICH-$TERM\n")
    shell.shows(b"/dev/pts/")
    shell.shows(f"/{job}.1.0/work/0\r\nthis-xterm".encode())
    shell.type(b"exit 5\n")
    assert shell.code() == 5


def test_ctrl_c_goes_to_the_program_inside_and_the_terminal_is_restored(shell, wait_for):
    before = stty(shell)
    shell.shows(b"leaves")
    shell.type(b"sleep 383\n")
    wait_for(lambda: commands("sleep", "383"))
    shell.type(b"\x03")
    wait_for(lambda: not commands("sleep", "383"))
    shell.type(b"echo still $((6 * 7))\n")
    shell.shows(b"still 42\r\n")
    shell.type(b"exit\n")
    assert (shell.code(), stty(shell) == before) == (0, True)


def stty(terminal):
    import termios

    return termios.tcgetattr(terminal.screen)[:4]


def test_the_terminal_inside_has_the_size_of_the_one_outside_also_when_that_changes(shell):
    import fcntl
    import struct
    import termios

    def resize(rows, columns):
        fcntl.ioctl(shell.screen, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    shell.shows(b"leaves")
    resize(33, 99)
    shell.type(b"while [ \"$(stty size)\" != '33 99' ]; do sleep 0.1; done; echo grown $((40 + 2))\n")
    shell.shows(b"grown 42")


def test_the_escape_leaves_a_shell_and_ends_it(shell, wait_for):
    shell.shows(b"leaves")
    shell.type(b"sleep 384\n")
    wait_for(lambda: commands("sleep", "384"))
    shell.type(b"\r~.")
    assert shell.code() == 130
    wait_for(lambda: not commands("sleep", "384"))


def test_a_shell_ends_with_its_job_and_says_so(shell, talking, job, wait_for):
    shell.shows(b"leaves")
    shell.type(b"sleep 385\n")
    wait_for(lambda: commands("sleep", "385"))
    talking.end()
    assert shell.code() == 3
    assert b"was stopped: the attempt has ended" in shell.seen
    assert not commands("sleep", "385")


@pytest.mark.parametrize(
    ("typed", "sent", "left"),
    [
        ([b"ls\r~."], b"ls\r", True),
        ([b"~", b"."], b"", True),
        ([b"~~x"], b"~x", False),
        ([b"a~.b"], b"a~.b", False),
        ([b"\n~", b"x~."], b"\n~x~.", False),
        ([b"~\r~."], b"~\r", True),
    ],
)
def test_leaving_takes_enter_tilde_and_a_dot(typed, sent, left):
    escape = EscapeFilter()
    told = [escape.feed(piece) for piece in typed]
    assert (b"".join(data for data, _ in told), told[-1][1]) == (sent, left)

"""What the verbs that read find and choose; hostile text acts nowhere."""

import json
import os
import pty
import subprocess

import pytest

from orchestrator.client import client as http

HOSTILE = "\x1b]0;pwned\x07\x1b[31mred\x1b[2J\x9b1m\u202etxt.exe\rover[bold]x"


@pytest.fixture
def job(live, checkpoint):
    return live.ran({"task": "run", "command": "true", "name": "hello"})


def on_a_terminal(command, words):
    """What the command writes when stdout is a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*command, *words],
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "200"},
    ) as child:
        os.close(theirs)
        written = b""
        try:
            while piece := os.read(ours, 65536):
                written += piece
        except OSError:  # how Linux says that the other end is closed
            pass
    os.close(ours)
    return child.returncode, written.decode()


def test_colours_are_for_terminals_and_for_those_who_want_them(command, live, job, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    code, written = on_a_terminal(command, ["jobs"])
    assert (code, "\x1b[32mSUCCEEDED" in written) == (0, True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in on_a_terminal(command, ["jobs"])[1]


def acting(text):
    """Characters of `text` that a terminal would act on; our own colours are taken out."""
    for colour in ("\x1b[1m", "\x1b[31m", "\x1b[33m", "\x1b[0m"):
        text = text.replace(colour, "")
    return [c for c in text if (c < " " and c != "\n") or c in "\x7f\x9b\u202e"]


def test_hostile_text_acts_neither_in_tables_nor_in_logs_nor_in_errors(command, here, live, recorded):
    live.fleet.hold(live.service)
    with http.connect(start=False) as client:
        job = client.jobs.submit({"task": "run", "command": "true", "name": "hello"})["id"]
    live.service.jobs_table.set_metrics(job, {HOSTILE: HOSTILE})
    failure = {"rank": 0, "node": HOSTILE, "kind": "user", "message": HOSTILE, "traceback": HOSTILE, "exit_code": 1}
    recorded.happened(live.service, job, "failed", reason=HOSTILE, failure=failure)
    live.fleet.printed(job, [HOSTILE, "plain"])
    live.fleet.up()
    live.fleet.tell(live.service, "cpu-0", findings=[{"level": "info", "subject": HOSTILE, "message": HOSTILE}])
    for words in (["jobs"], ["show", "hello"], ["logs", "hello"], ["logs", "-f", "hello"], ["doctor"]):
        piped, shown = here(*words), on_a_terminal(command, words)[1].replace("\r\n", "\n")
        for written in (piped.stdout + piped.stderr, shown):
            assert (acting(written), "pwned" in written, "over[bold]x" in written) == ([], False, True), words
    assert acting(here("show", HOSTILE).stderr) == []
    for form in ("json", "yaml"):
        assert acting(here("show", "hello", "-o", form).stdout) == []
    assert json.loads(here("show", "hello", "-o", "json").stdout)["reason"] == HOSTILE


def test_lines_of_a_log_come_as_they_were_written(here, live, job):
    live.fleet.printed(job["id"], ["one", "\ttwo", "10%\r20%\r30%", ""])
    assert here("logs", "hello").stdout == "one\n\ttwo\n10%\n20%\n30%\n\n"
    assert here("logs", "--tail", "2", "hello").stdout == "10%\n20%\n30%\n\n"
    lines = [json.loads(line) for line in here("logs", "hello", "-o", "json").stdout.splitlines()]
    assert [line["text"] for line in lines] == ["one", "\ttwo", "10%\r20%\r30%", ""]


def test_jobs_can_be_chosen_by_state_name_and_time(here, live, job):
    def ids(*words):
        return [found["id"] for found in json.loads(here("jobs", *words, "-o", "json").stdout)]

    assert ids("--state", "succeeded") == ids("--name", "hello") == ids("--since", "1h") == [job["id"]]
    assert ids("--state", "FAILED") == ids("--name", "other") == ids("--since", "2999-01-01") == []
    wrong = here("jobs", "--state", "suceeded")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: no state 'suceeded'\n  did you mean 'SUCCEEDED'?")
    assert here("jobs", "--since", "soon").stderr.startswith("error: --since 'soon' is not a time\n  write 30m, 2h")


def test_all_jobs_are_as_many_as_there_are(here, live, job):
    with http.connect(start=False) as client:
        told = client.jobs.submit_many([{"spec": {"command": "true", "resources": {"pool": "xla"}}}] * 120)
    ids = [job["id"], *(row["id"] for row in told["jobs"])]
    assert [found["id"] for found in json.loads(here("jobs", "-o", "json").stdout)] == ids[-100:]
    assert [found["id"] for found in json.loads(here("jobs", "--all", "-o", "json").stdout)] == ids
    assert len(here("jobs", "--all").stdout.splitlines()) == 122


def test_the_inventory_tells_kind_memory_and_state(here, live):
    live.fleet.lose(live.service, "xla-0")
    table = here("inventory").stdout
    assert "lost: Ray marked the node dead" in table
    assert "23.5 GiB" in table
    backends = {row["backend"]: row for row in json.loads(here("backends", "-o", "json").stdout)}
    assert backends["nvidia"]["available"] is False
    assert backends["nvidia"]["reason"] == "the fleet has no pool of this back end"


def test_doctor_exits_with_1_for_what_must_be_acted_on(here, live):
    finding = {"subject": "driver", "message": "too old", "remedy": "update it"}
    for level, code in (("info", 0), ("warning", 1), ("error", 1)):
        live.fleet.tell(live.service, "cpu-0", findings=[finding | {"level": level}])
        done = here("doctor")
        assert (done.returncode, "too old" in done.stdout, done.stderr) == (code, True, "")


def test_schemas_are_json_schemas_and_need_no_server(here, tmp_path, monkeypatch):
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path / "none"))
    for kind in ("job", "fleet"):
        done = here("schema", kind)
        assert json.loads(done.stdout)["$schema"].startswith("https://json-schema.org/")
    assert not (tmp_path / "none").exists()


def test_a_terminal_without_utf8_gets_an_answer_too(polyfleet, live):
    live.ran({"task": "run", "command": "echo größer 你好 >&2; false", "name": "hello"}, "FAILED")
    done = polyfleet("show", "hello", "-o", "json", env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"})
    assert json.loads(done.stdout)["failure"]["message"].endswith("größer 你好")
    assert polyfleet("show", "hello", env={"PYTHONIOENCODING": "ascii"}).returncode == 0


def test_the_log_of_a_job_whose_node_is_away_says_so_and_nothing_on_stdout(here, live):
    [node] = live.ran({"task": "run", "command": ["echo", "seen"], "name": "away"})["nodes"]
    assert here("logs", "away").stderr == ""
    live.fleet.lose(live.service, node)
    done = here("logs", "away")
    assert f"the log of attempt 1 is on node {node}, which has been away for " in done.stderr
    assert (done.returncode, done.stdout) == (3, "")

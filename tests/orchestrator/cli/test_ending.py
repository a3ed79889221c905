"""How a command ends when it cannot do what it was asked: words, exit code, never a traceback."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from orchestrator.client import client as http


def test_an_unknown_option_or_verb_is_exit_code_2(polyfleet):
    for words in (
        ["jobs", "--absent"],
        ["absent"],
        ["schema", "pool"],
        ["jobs", "--limit", "0"],
        ["jobs", "-o", "xml"],
    ):
        done = polyfleet(*words)
        assert (done.returncode, done.stdout) == (2, ""), words
        assert "Traceback" not in done.stderr


def test_a_missing_job_is_exit_code_2(here, live):
    for words in (["show"], ["logs"], ["cancel"], ["explain"], ["migrate", "--to", "cpu"]):
        done = here(words[0], "absent", *words[1:])
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "error: no job 'absent'\n  valid: none\n"


def test_several_jobs_are_cancelled_at_once_or_none_if_one_is_missing(here, live):
    ended = live.ran({"task": "run", "name": "ended", "command": "true"})["id"]
    live.fleet.hold(live.service)
    with http.connect(start=False) as client:
        first, second = (client.jobs.submit({"task": "run", "command": "true"})["id"] for _ in range(2))
    done = here("cancel", first, "absent", second)
    assert (done.returncode, done.stdout) == (2, "") and "error: no job 'absent'" in done.stderr
    assert {job["state"] for job in json.loads(here("jobs", "-o", "json").stdout)} == {"SUCCEEDED", "PENDING"}

    done = here("cancel", first, ended, second, first)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{first}: CANCELLED\n{ended}: SUCCEEDED (it had already ended)\n{second}: CANCELLED\n"
    printed = json.loads(here("cancel", second, ended, "-o", "json").stdout)
    assert [(job["id"], job["state"]) for job in printed] == [(second, "CANCELLED"), (ended, "SUCCEEDED")]
    assert json.loads(here("cancel", second, "-o", "json").stdout)["state"] == "CANCELLED"


def test_a_fleet_that_cannot_serve_is_exit_code_3(here, live):
    live.fleet.down(live.service)
    done = here("submit", "--dry-run", "--", "true")
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "error: no fleet is up\n  run `polyfleet up` first\n")


def test_a_wrong_token_is_exit_code_2(here, live):
    (live.home / "token").write_text("0" * 64)
    done = here("jobs")
    assert done.returncode == 2
    assert "does not know the token of this home" in done.stderr
    assert "0000" not in done.stderr


def test_a_server_of_another_version_is_exit_code_2_with_the_remedy(here, live):
    record = live.home / "server.json"
    record.write_text(record.read_text().replace('"version": "', '"version": "9.'))
    done = here("jobs")
    assert done.returncode == 2
    assert "`polyfleet server stop`" in done.stderr


def test_what_nobody_foresaw_is_one_line_and_a_log_with_the_traceback(here, live, monkeypatch):
    monkeypatch.setattr("orchestrator.client.client.connect", lambda **_: 1 / 0)
    done = here("jobs")
    assert (done.returncode, done.stdout) == (1, "")
    first, second = done.stderr.splitlines()
    assert first == "error: ZeroDivisionError: division by zero"
    log = Path(second.rpartition(" ")[2])
    assert "Traceback" in log.read_text()
    assert log.parent == live.home / "logs"


def test_a_fault_of_the_server_is_told_as_such(here, live, monkeypatch):
    monkeypatch.setattr(live.service.jobs_table, "page", lambda *_: {}[0])
    done = here("jobs")
    assert done.returncode == 1
    assert done.stderr.startswith("error: the server failed: KeyError: 0\n")


def test_a_reader_that_goes_away_is_no_error(command, live, here):
    job = live.ran({"task": "run", "name": "long", "command": "true"})
    live.fleet.printed(job["id"], [f"{n} {'x' * 200}" for n in range(5000)])
    line = f"{' '.join(command)} logs long | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"0 {'x' * 200}", "141"]
    assert done.stderr == ""


def test_without_a_server_status_starts_none(here, tmp_path, monkeypatch):
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path / "none"))
    for words in (["status"], ["server", "status"]):
        done = here(*words)
        assert (done.returncode, "not running" in done.stdout or "no" in done.stdout) == (0, True)
    assert not (tmp_path / "none").exists()
    assert here("server", "stop").stderr == "no server was running\n"


def test_status_of_a_server_without_a_fleet_says_what_to_do(here, live):
    live.fleet.down(live.service)
    done = here("status")
    assert (done.returncode, "no fleet is up; run `polyfleet up` first" in done.stdout) == (0, True)


@pytest.mark.parametrize("words", [["up", "--demo", "--address", "h:1"], ["up", "--file", "a.yaml", "--demo"]])
def test_up_takes_one_source(here, words):
    assert here(*words).returncode == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pools: {a: {backend: nvidiaa}}", "did you mean 'nvidia'"),
        ("pools: {}", "pools"),
        ("pool: {}", "unknown key 'pool'"),
    ],
)
def test_up_refuses_a_bad_fleet_file_before_it_starts_anything(here, tmp_path, monkeypatch, text, message):
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path / "none"))
    (tmp_path / "fleet.yaml").write_text(text)
    done = here("up", "--file", str(tmp_path / "fleet.yaml"))
    assert (done.returncode, done.stdout, message in done.stderr) == (2, "", True)
    assert not (tmp_path / "none").exists()


def test_environments_are_named_in_errors(here, tmp_path, monkeypatch):
    monkeypatch.setenv("POLYFLEET_CACHE", str(tmp_path))
    assert here("env", "list").stdout.startswith("no environments")
    done = here("env", "path", "xla")
    assert (done.returncode, "polyfleet env create xla" in done.stderr) == (2, True)
    assert here("env", "create", "absent").returncode == 2
    assert here("env", "remove", "absent").returncode == 2


def test_a_benchmark_is_one_table_and_one_exit_code(here, live, tmp_path, measuring):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "m.py").write_text("def make(): ...")
    done = here("benchmark", "run", "m.py:make", "--working-dir", str(tmp_path / "code"), "--rounds", "3", "--no-train")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["CASE", "cpu", "tpu:emulated"]
    assert "0.50× ▼" in lines[1]
    told = json.loads(here("benchmark", "run", "mlp", "-o", "json").stdout)
    assert told["results"][1]["versus"]["verdict"] == "SLOWER"
    printed = [told, json.loads(here("benchmark", "report", "--format", "json").stdout)]
    printed.append(json.loads(here("benchmark", "show", told["run"], "-o", "json").stdout))
    assert [report["cells"] for report in printed] == [report["results"] for report in printed], "until version 0.2.0"
    assert here("benchmark", "report", "--format", "json", "-o", str(tmp_path / "report.json")).returncode == 0
    assert "cells" not in json.loads((tmp_path / "report.json").read_text())
    detached = here("benchmark", "run", "mlp", "--detach", "--key", "k").stdout
    assert re.fullmatch("bench-[0-9a-f]{12}\n", detached)
    assert here("benchmark", "run", "mlp", "--detach", "--key", "k").stdout == detached
    for words, sentence in (
        (("mpl",), "did you mean 'mlp'"),
        (("mlp", "--precision", "fp33"), "precisions"),
        (("mlp", "--level", "O9"), "levels"),
        (("mlp", "m.py:make"), "either cases or one model"),
    ):
        done = here("benchmark", "run", *words)
        assert (done.returncode, done.stdout, sentence in done.stderr) == (2, "", True), done


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("words", [["jobs"], ["jobs", "-o", "json"], ["schema", "job"]], ids=" ".join)
def test_an_answer_that_cannot_be_written_is_told(polyfleet, live, words):
    with Path("/dev/full").open("w") as full:
        done = polyfleet(*words, capture_output=False, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (3, False)
    assert done.stderr.startswith("error: the output cannot be written: No space left on device\n")


def test_a_caller_that_closed_stdout_gets_its_exit_code(command, live):
    line = f"{' '.join(command)} jobs >&-"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_home_that_cannot_be_one_is_named(here, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for home in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("POLYFLEET_HOME", str(home))
        for words in (["jobs"], ["status"], ["up"], ["down"]):
            done = here(*words)
            assert (done.returncode, done.stdout) == (2, ""), words
            assert done.stderr.startswith(f"error: {home}")
            assert "set POLYFLEET_HOME to a folder that you own" in done.stderr

"""What a run of tests does beside testing, in small runs of pytest: repeating, limits, and leaving nothing behind."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import brief_reports
import flaky_campaign
import leftovers
import pytest
from patience import wait_for

TESTS = Path(__file__).parent
OWN = ("POLYFLEET_TESTS_", "PYTEST_", "POLYFLEET_TEST_")


@pytest.fixture
def project(tmp_path: Path) -> Callable[[str], Path]:
    """`project(text)`: a folder with one file of tests."""

    def make(text: str) -> Path:
        folder = tmp_path / "project"
        (folder / "tests").mkdir(parents=True)
        (folder / "tests" / "test_it.py").write_text(textwrap.dedent(text))
        unused = "-p no:hypothesispytest -p no:anyio"  # a third of the time until a run begins
        (folder / "pytest.ini").write_text(f"[pytest]\naddopts = --import-mode=importlib {unused} -p conftest\n")
        return folder

    return make


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts pytest with our plugins, as a run of its own whose temporary folders are below `tmp_path / "t"`."""
    started = []
    (tmp_path / "t").mkdir()

    def start(folder: Path, *words: str, **variables: str) -> "subprocess.Popen[str]":
        environment = {name: value for name, value in os.environ.items() if not name.startswith(OWN)}
        environment |= {"PYTHONPATH": str(TESTS), "TMPDIR": str(tmp_path / "t")}
        environment |= {"POLYFLEET_TESTS_ENDING_S": "0.5"} | variables
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=folder, env=environment, text=True, start_new_session=True, **pipes)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


FAILS_ONCE = """
    import os, pathlib, subprocess
    import pytest

    HERE = pathlib.Path(__file__).parent

    def fails_once(name):
        before = (HERE / name).exists()
        (HERE / name).touch()
        assert before, f"{name} for the first time"

    @pytest.fixture
    def process():
        subprocess.run(["true"], check=True)

    def test_with_a_process_of_its_own():
        subprocess.run(["true"], check=True)
        fails_once("own")

    def test_with_a_process_of_its_fixture(process):
        fails_once("fixture")
"""


def test_a_test_with_processes_that_passes_alone_is_flaky_and_fails_no_run(project, begin, tmp_path):
    failures = tmp_path / "failures"
    run = begin(project(FAILS_ONCE), "-n2", POLYFLEET_TESTS_FAILURES=str(failures))
    said, _ = run.communicate()
    assert run.returncode == 0, said
    names = [f"tests/test_it.py::test_with_a_process_of_its_{name}" for name in ("own", "fixture")]
    assert [said.count(f"FLAKY {name}: ") for name in names] == [1, 1], said
    assert failures.read_text().count("FAILED") == failures.read_text().count("FLAKY") == 2


def test_a_flaky_test_hides_no_warning_of_the_garbage_collector(project, begin):
    leaves = """
    def test_leaves_a_socket():
        import socket
        circle = [socket.socket()]
        circle.append(circle)
    """
    run = begin(project(FAILS_ONCE + leaves), "-Werror", "-Wdefault::pytest.PytestUnraisableExceptionWarning")
    said, _ = run.communicate()
    assert run.returncode == 1 and said.count("FLAKY") == 2 and "this run fails" in said, said


def test_a_test_without_a_process_is_not_repeated(project, begin):
    text = FAILS_ONCE + "\n    def test_pure():\n        fails_once('pure')\n"
    run = begin(project(text))
    said, _ = run.communicate()
    assert run.returncode == 1 and "FLAKY tests/test_it.py::test_pure" not in said, said
    assert said.count("passed when run again alone: ") == 2 and said.count("pure for the first time") == 3, said


def test_three_flaky_ones_fail_the_run_and_nothing_is_repeated_where_that_is_said(project, begin):
    text = FAILS_ONCE + "\n    def test_third(process):\n        fails_once('third')\n"
    folder = project(text)
    once = begin(folder, POLYFLEET_TESTS_RETRY="no")
    said, _ = once.communicate()
    assert once.returncode == 1 and "run again" not in said
    for file in ("own", "fixture", "third"):
        (folder / "tests" / file).unlink()
    run = begin(folder)
    said, _ = run.communicate()
    assert run.returncode == 1 and said.count("passed when run again alone: ") == 3, said


def test_what_takes_longer_than_its_limit_says_where_its_processes_are(project, begin):
    run = begin(
        project("""
        import subprocess, sys
        import pytest

        CODE = "import time\\ndef deep():\\n    time.sleep(600)\\ndeep()"

        @pytest.mark.timeout(3)
        def test_waits():
            with subprocess.Popen([sys.executable, "-c", CODE]) as child:
                try:
                    child.wait()
                finally:
                    child.kill()

        def test_goes_on():
            pass
        """),
        POLYFLEET_TESTS_RETRY="no",
    )
    said, _ = run.communicate()
    assert run.returncode == 1 and "1 failed, 1 passed" in said, said
    assert "Timeout (>3.0s) from pytest-timeout" in said
    assert "processes that it had started when its limit had passed" in said and "time.sleep(600)" in said
    assert "deep (" in said or "waits in" in said, said  # py-spy may look at no other process, but as root


def test_what_the_garbage_collector_ends_fails_the_run_and_no_test(project, begin):
    run = begin(
        project("""
        import socket

        def test_leaves_a_socket_in_a_circle():
            circle = [socket.socket()]
            circle.append(circle)

        def test_is_innocent():
            pass
        """),
        "-Werror",
        "-Wdefault::pytest.PytestUnraisableExceptionWarning",
    )
    said, _ = run.communicate()
    assert run.returncode == 1 and "2 passed" in said and "failed" not in said.split("=====")[-2], said
    assert "warnings raised during garbage collection: this run fails" in said
    assert "tests/test_it.py, or a file that ran before it in the same process" in said


OUTCOMES = """
    import pytest

    @pytest.fixture
    def setup_fails():
        print("said before")
        assert False, "setup has failed"

    @pytest.fixture
    def teardown_fails():
        yield
        assert False, "teardown has failed"

    def test_fails(): assert False, "call has failed"
    def test_is_skipped(): pytest.skip("skipped here")
    def test_never_begins(setup_fails): pass
    def test_ends_badly(teardown_fails): pass
    @pytest.mark.xfail
    def test_fails_as_expected(): assert False
"""


def test_processes_of_tests_report_every_outcome_and_where_it_came_about(project, begin):
    said, _ = begin(project(OUTCOMES), "-n2", "-ra", POLYFLEET_TESTS_RETRY="no").communicate()
    assert "1 failed, 1 passed, 1 skipped, 1 xfailed, 2 errors in " in said, said
    for text in ("skipped here", "said before", "setup has failed", "teardown has failed"):
        assert text in said, said
    assert said.count("call has failed") >= 2, "when it happens, and in the summary"


def report(when, duration=0.0, outcome="passed", sections=()):
    return pytest.TestReport("a", ("a", 1, "a"), {}, outcome, None, when, sections, duration)


def test_a_short_setup_or_teardown_that_passed_is_no_news():
    assert not brief_reports.is_news(report("setup")) and not brief_reports.is_news(report("teardown"))
    told = [report("call"), report("setup", outcome="failed"), report("teardown", outcome="failed")]
    told += [report("setup", outcome="skipped"), report("teardown", duration=brief_reports.BRIEF_S)]
    told += [report("setup", sections=[("Captured stdout setup", "said")])]
    assert all(brief_reports.is_news(one) for one in told)


LEAVES = """
    import os, pathlib, signal, subprocess, sys, tempfile, time

    def test_leaves_everything(tmp_path):
        where = pathlib.Path(tempfile.mkdtemp())
        (where / "closed").mkdir(mode=0o000)
        memory = pathlib.Path("/dev/shm", f"of-{os.getpid()}")
        memory.write_text("memory")
        if os.getuid() == 0:
            os.chown(memory, 65534, 65534)  # as that of PostgreSQL
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.Popen(["sleep", "600"], start_new_session=True, **quiet).returncode = 0
        subprocess.Popen(["sleep", "601"], cwd=where, env={}, start_new_session=True, **quiet).returncode = 0
        pathlib.Path(os.environ["READY"]).write_text(str(os.getpid()))
        while os.environ["STAYS"]:
            time.sleep(0.1)
"""


@pytest.mark.skipif(not leftovers.SHARED_MEMORY.is_dir(), reason="no /dev/shm here")
@pytest.mark.parametrize("ends", ["by itself", "by Ctrl-C", "by kill -9"])
@pytest.mark.parametrize("processes", ["", "-n1"], ids=["one process", "xdist"])
def test_nothing_is_left_of_a_run(project, begin, tmp_path, ends, processes):
    ready, stays = tmp_path / "ready", ends != "by itself"
    run = begin(project(LEAVES), *filter(None, [processes]), READY=str(ready), STAYS="1" if stays else "")
    wait_for(lambda: ready.exists() and ready.read_text(), "the test has begun")
    if ends == "by Ctrl-C":
        os.killpg(run.pid, signal.SIGINT)  # a terminal sends it to all
    elif stays:
        run.kill()
    said, _ = run.communicate()
    if not stays:
        assert run.returncode == 1 and "2 processes were still running after the tests" in said, said
    wait_for(lambda: not list((tmp_path / "t").iterdir()), "temporary folders")
    memory = leftovers.SHARED_MEMORY / f"of-{ready.read_text()}"
    wait_for(lambda: not memory.exists(), memory)
    assert not list(leftovers.processes_of("none of these", tmp_path / "t"))


def test_two_runs_of_a_campaign_are_in_progress_at_once(project, monkeypatch, capsys):
    folder = project("""
        import os, pathlib
        from patience import wait_for

        def test_waits_until_two_runs_have_begun():
            folder, seed = pathlib.Path(__file__).parent, os.environ["POLYFLEET_TESTS_SEED"]
            (folder / f"began-{seed}").touch()
            wait_for(lambda: len(list(folder.glob("began-*"))) > 1, "two runs")
            assert seed != "7", "it fails in the second run"
    """)
    for name in [name for name in os.environ if name.startswith(OWN)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.syspath_prepend(TESTS.parent / "benchmarks")
    monkeypatch.setattr(flaky_campaign, "ROOT", folder)
    monkeypatch.setattr(flaky_campaign, "LOOPS_PER_CORE", 0)
    words = ["flaky_campaign.py", "--runs=3", "--at-once=2", "--seed=6", "--processes=0", f"-o{folder}/runs.json"]
    monkeypatch.setattr(sys, "argv", words)
    assert flaky_campaign.main() == 1
    runs = sorted(json.loads((folder / "runs.json").read_text())["runs"], key=lambda run: run["seed"])
    assert [(run["seed"], run["exit_code"], len(run["failed"])) for run in runs] == [(6, 0, 0), (7, 1, 1), (8, 0, 0)]
    assert "test_waits_until_two_runs_have_begun | 1 | 3 | AssertionError: it fails" in capsys.readouterr().out

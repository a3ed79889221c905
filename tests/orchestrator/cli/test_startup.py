"""The command answers at once: what is heavy is imported by the verb that needs it."""

import ast
import subprocess
import sys

import pytest

from cluster.version import VERSION

HEAVY = (
    *("torch", "ray", "numpy", "matplotlib", "pydantic", "httpx", "fastapi", "uvicorn", "rich", "yaml", "psutil"),
    "sqlalchemy",
)


def imported(code):
    probe = f"import sys\n{code}\nprint([name for name in {HEAVY} if name in sys.modules])"
    return subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True
    ).stdout.splitlines()[-1]


def test_importing_the_command_imports_nothing_heavy():
    assert imported("import orchestrator.cli.main") == "[]"


def test_no_garbage_is_collected_while_the_command_is_imported():
    code = """
import gc, sys
collections = []
gc.callbacks.append(lambda phase, info: collections.append("orchestrator.cli.main" in sys.modules))
import orchestrator.cli.__main__
assert True not in collections
assert gc.isenabled()
print(gc.get_freeze_count())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 10_000


@pytest.mark.parametrize(
    ("words", "typers_own"),
    [
        (["--help"], []),
        (["--version"], []),
        (["submit", "--help"], ["pydantic"]),
        (["checkpoint", "copy", "--help"], ["pydantic"]),
    ],
    ids=str,
)
def test_help_imports_nothing_heavy(words, typers_own):
    code = f"""
from orchestrator.cli.main import app
try:
    app({words}, prog_name="polyfleet")
except SystemExit as e:
    assert e.code == 0
"""
    assert set(ast.literal_eval(imported(code))) <= set(typers_own)


def test_no_verb_that_reads_imports_ray_or_torch(live, polyfleet):
    for words in (
        ["jobs"],
        ["inventory"],
        ["status"],
        ["doctor"],
        ["schema", "job"],
        ["schema", "fleet"],
        ["checkpoint", "list"],
    ):
        done = polyfleet(*words, env={"PYTHONPROFILEIMPORTTIME": "1"})
        assert done.returncode == 0, done.stderr
        names = {
            line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")
        }
        assert len(names) > 50
        assert names & {"torch", "ray", "fastapi", "numpy", "sqlalchemy", "pygments"} == set()


def test_the_version_is_printed(polyfleet):
    assert polyfleet("--version").stdout == f"polyfleet {VERSION}\n"


def test_without_a_verb_it_prints_the_help(polyfleet):
    assert "Usage: polyfleet" in polyfleet().stdout + polyfleet().stderr


def test_help_documents_every_verb_and_the_exit_codes(polyfleet):
    text = polyfleet("--help").stdout
    verbs = "up down status inventory backends doctor submit jobs show logs cancel migrate explain benchmark"
    assert [
        verb for verb in f"{verbs} checkpoint node schema env server completion".split() if f"\n  {verb} " not in text
    ] == []
    assert "Exit codes" in text
    assert " 130 " in text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_the_shell(polyfleet, shell):
    done = polyfleet("completion", shell)
    assert done.returncode == 0
    assert "_POLYFLEET_COMPLETE" in done.stdout


def test_the_shell_is_answered(polyfleet):
    asked = {"_POLYFLEET_COMPLETE": "complete_bash", "COMP_WORDS": "polyfleet checkpoint ", "COMP_CWORD": "2"}
    assert polyfleet(env=asked).stdout.split() == [
        *("list", "show", "verify", "diff", "plan", "convert", "copy", "prune", "pin", "import", "export")
    ]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="bash of this system may be too old")
def test_bash_takes_the_script(polyfleet):
    script = polyfleet("completion", "bash").stdout
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0

"""The commands and the code of the README and the guides, run on a real fleet.

Console blocks of a page run in one shell, its Python blocks in one process, in the order they stand. After a command,
`# exit code N or M` says what it ends with.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from snippets import PAGES, ROOT, commands, of

from cluster.environments import environments
from cluster.errors import NotFound

pytestmark = pytest.mark.full

EXIT_CODES = re.compile(r"\s+# exit code (\d+(?: or \d+)*)$")
MEASURES = "polyfleet benchmark run"
COMPARES = f"{MEASURES} model.py:make_model --working-dir examples/digits --batch-size 64"
# The pages' fleet is ours for all of them: it comes up before the first and is taken down after the last. What the
# README compares the guide to benchmarks compares too, in fewer rounds.
INSTEAD = {"polyfleet up --demo": 'polyfleet up --file "$FLEET"', "polyfleet down": "true", COMPARES: "true"}
FEW = "--rounds 3 --max-rounds 3 --case-seconds 0.1"
"""Of a benchmark run here: that it works is asked, not what it finds. The last of two equal options counts."""


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables of a shell with a fleet up: pools `cpu` and `xla`, the latter emulated or, without that environment, a
    second CPU pool of that name."""
    folder = tmp_path_factory.mktemp("snippets")
    try:
        environments.path("xla")
        xla = "{backend: tpu, environment: xla, env: {PJRT_DEVICE: CPU}}"
    except NotFound:
        xla = "{backend: cpu}"
    fleet = folder / "fleet.yaml"
    fleet.write_text(f"name: pages\npools:\n  cpu: {{backend: cpu}}\n  xla: {xla}\n")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = os.environ | {"POLYFLEET_HOME": str(folder / "home"), "FLEET": str(fleet), "PATH": path}
    run_shell('polyfleet up --file "$FLEET"', variables)
    yield variables
    run_shell("polyfleet down", variables)


def run_shell(script: str, variables: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("curl") is None, reason="the pages use curl")
@pytest.mark.parametrize("page", [p for p in PAGES if any(b.run for b in of("console", p))], ids=lambda p: p.stem)
def test_the_commands_of_a_page_end_as_it_says(page: Path, shell: dict[str, str]):
    lines = ["set -o pipefail"]
    for block in of("console", page):
        for command in commands(block) if block.run else ():
            told = EXIT_CODES.search(command)
            wanted = told[1].replace(" or ", "|") if told else "0"
            lines += [f"echo {shlex.quote(f'{block}: {command}')}", run_instead(command)]
            lines += [f"case $? in {wanted}) ;; *) echo not the exit code that was told; exit 1 ;; esac"]
    run_shell("\n".join(lines), shell)


def run_instead(command: str) -> str:
    if command in INSTEAD:
        return INSTEAD[command]
    return f"{command} {FEW}" if command.startswith(MEASURES) else command


def test_what_is_not_measured_for_one_page_is_for_another():
    guide = ROOT / "docs" / "guides" / "benchmark.md"
    assert [c for block in of("console", guide) if block.run for c in commands(block) if c.startswith(f"{COMPARES} ")]


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.run for b in of("python", p))], ids=lambda p: p.stem)
def test_the_code_of_a_page_runs(page: Path, shell: dict[str, str], tmp_path: Path):
    script = tmp_path / "page.py"
    script.write_text("\n\n".join(f"# {block}\n{block.text}" for block in of("python", page) if block.run))
    run_shell(f"python {shlex.quote(str(script))}", shell)

"""The chapter of the README on several machines, word for word but for `sudo` and where its files are written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bed import ROOT, missing, refused

pytestmark = pytest.mark.full

CHAPTER = re.compile(r"^## Several machines\n(.*?)^## ", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    chapter = CHAPTER.search((ROOT / "README.md").read_text())
    assert chapter is not None
    lines = [line for block in BLOCK.findall(chapter[1]) for line in block.splitlines()]
    return [line.removeprefix("$ ").removeprefix("sudo ") for line in lines]


@pytest.mark.skipif(bool(missing() or refused()), reason=missing() or refused())
def test_a_job_goes_on_on_another_machine_and_its_result_comes_home(tmp_path: Path):
    here = tmp_path / "clone"
    here.mkdir()
    for entry in ("examples", "tests", "cluster", "workers", "orchestrator"):
        (here / entry).symlink_to(ROOT / entry)
    (here / ".venv").symlink_to(sys.prefix)
    script = ["set -eo pipefail", "trap 'polyfleet down; python tests/machines/three.py down' ERR", *commands()]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = os.environ | {"POLYFLEET_HOME": str(tmp_path / "home"), "PATH": path}
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)], cwd=here, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert re.search(r"^nodes +cpu-m[123]$", done.stdout, re.MULTILINE)
    assert re.search(r"^resumed +at step [1-9]", done.stdout, re.MULTILINE), done.stdout
    assert list(here.glob("sine-result/step-00000200-*/MANIFEST.json"))
    assert not (here / "machines").exists()

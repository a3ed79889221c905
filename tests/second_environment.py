"""The second environment: another Python with torch_xla and IPEX."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

INTERPRETER = os.environ.get("POLYFLEET_XLA_PYTHON", "")
"""Empty where there is none."""


def on_xla(arguments: list[str]) -> Any:
    """What a program prints there as its last line, as JSON has it."""
    repository = str(Path(__file__).parents[1])
    done = subprocess.run(
        [INTERPRETER, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": repository, "PJRT_DEVICE": "CPU"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


ROOT = Path(__file__).parents[1]
# The pool environment has no pytest and needs none: ours is pure Python, shown to it alone, without our torch.
PYTEST = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
# Torch's and the vendors' own, in that older environment.
NOISE = (
    "DeprecationWarning",
    "FutureWarning",
    "UserWarning:intel_extension_for_pytorch",
    "UserWarning:torch_xla",
    "UserWarning:torch.autograd.graph",  # IPEX replaces layer_norm without its own autograd kernel
)
# Variables by which a run records itself: a failure there is one of the test that runs it, and is recorded once.
OURS = ("COV", "POLYFLEET_TESTS_FAILURES")
# Of what `.ci/run` installs, that environment has the compiler.
HAS = "compiler"


def run_tests(words: Iterable[Path | str], folder: Path) -> list[str]:
    """Runs files of tests there, in one process, and says which were skipped; `folder` is for its files. Skips the test
    where that environment is not."""
    if not INTERPRETER:
        pytest.skip("POLYFLEET_XLA_PYTHON names no interpreter that has torch-xla and IPEX")
    assert Path(INTERPRETER).is_file(), f"POLYFLEET_XLA_PYTHON is {INTERPRETER}, and there is no such file"
    ignored = [f"-Wignore::{rule}" for rule in NOISE]
    options = ["-q", "-rs", "-p", "no:cacheprovider", "-p", "open_xla", "--basetemp", str(folder / "their"), *ignored]
    done = subprocess.run(
        [INTERPRETER, "-m", "pytest", *options, *map(str, words)],
        cwd=ROOT,
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith(OURS)},
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", _only_pytest(folder)))),
            "OMP_NUM_THREADS": "1",
            "PJRT_DEVICE": "CPU",
            "POLYFLEET_CPU_ENGINE": "ipex",
            "POLYFLEET_TESTS_NEED": HAS if HAS in os.environ.get("POLYFLEET_TESTS_NEED", "").split() else "",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]


def _only_pytest(folder: Path) -> Path:
    for name in PYTEST:
        spec = find_spec(name)
        assert spec is not None and spec.origin is not None, name
        origin = Path(spec.origin)
        source = origin.parent if origin.name == "__init__.py" else origin
        (folder / source.name).symlink_to(source)
    return folder

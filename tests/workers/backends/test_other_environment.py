"""Runs the suites about devices in the pool environment with torch-xla and IPEX: another Python, another torch."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
TASKS, KERNELS = HERE.parent / "tasks", HERE.parent / "kernels"
# The pool environment has no pytest and needs none: ours is pure Python, shown to it alone, without our torch.
PYTEST = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
# Torch's and the vendors' own, in that older environment.
NOISE = ("DeprecationWarning", "FutureWarning", "UserWarning:intel_extension_for_pytorch", "UserWarning:torch_xla")

# NumPy is the same there; Triton and what drives a GPU are not in it.
WITHOUT_NUMPY = ("-k", "not numpy")
# Of what `.ci/run` installs, that environment has the compiler.
HAS = "compiler"

# What a CPU without units for a dtype cannot show; nothing else is skipped in that environment.
UNITS_ARE_MISSING = "has no native"

SUITES = {
    "devices": (
        HERE / "test_contract.py",
        HERE / "test_xla.py",
        HERE / "test_cpu_engines.py",
        HERE / "test_options.py",
        HERE / "test_users_loops.py",
        HERE.parent / "optimizers" / "test_optimizer.py",
        *(HERE.parent / "memory").glob("test_*.py"),
        HERE.parents[1] / "examples" / "test_back_end_examples.py",
        HERE.parent / "libraries" / "test_libraries.py",
        HERE.parent / "capability" / "test_matrix.py",
        HERE.parent / "validation" / "test_validate.py",
        HERE.parent / "selection" / "test_factory.py",
    ),
    "kernels": (
        KERNELS / "test_operators.py",
        KERNELS / "test_gradients.py",
        KERNELS / "test_contract.py",
        *WITHOUT_NUMPY,
    ),
    "the tasks": (TASKS / "test_train.py", TASKS / "test_prepare.py", TASKS / "test_benchmark.py"),
}
"""Files and words of pytest. In one process each: importing torch-xla and IPEX takes five seconds."""


def _interpreter():
    path = os.environ.get("POLYFLEET_XLA_PYTHON", "")
    if not path:
        pytest.skip("POLYFLEET_XLA_PYTHON names no interpreter that has torch-xla and IPEX")
    if not Path(path).is_file():
        pytest.fail(f"POLYFLEET_XLA_PYTHON is {path}, and there is no such file")
    return path


def _only_pytest(folder):
    for name in PYTEST:
        spec = find_spec(name)
        assert spec is not None, name
        origin = Path(spec.origin)
        source = origin.parent if origin.name == "__init__.py" else origin
        (folder / source.name).symlink_to(source)
    return folder


@pytest.mark.xla
@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES, ids=str)
def test_the_suite_passes_where_torch_xla_and_ipex_are(suite, tmp_path):
    interpreter = _interpreter()
    ignored = [f"-Wignore::{rule}" for rule in NOISE]
    files = [str(path) for path in SUITES[suite]]
    done = subprocess.run(
        [
            interpreter,
            "-m",
            "pytest",
            "-q",
            "-rs",
            "-p",
            "no:cacheprovider",
            "--basetemp",
            str(tmp_path / "their"),
            *ignored,
            *files,
        ],
        cwd=ROOT,
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("COV")},
            "PYTHONPATH": f"{ROOT}{os.pathsep}{_only_pytest(tmp_path)}",
            "OMP_NUM_THREADS": "1",
            "PJRT_DEVICE": "CPU",
            "POLYFLEET_CPU_ENGINE": "ipex",
            "POLYFLEET_TESTS_NEED": HAS if HAS in os.environ.get("POLYFLEET_TESTS_NEED", "").split() else "",
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all(UNITS_ARE_MISSING in line for line in skipped) or suite != "devices", skipped

"""Suites about devices, kernels and tasks in the second environment: another Python, another torch. The contract of
back ends is tested there by test_second_environment.py."""

from pathlib import Path

import pytest
from second_environment import run_tests

pytestmark = [pytest.mark.full, pytest.mark.xla]

HERE = Path(__file__).parent
WORKERS = HERE.parents[1]
TASKS, KERNELS, MODELS = WORKERS / "tasks", WORKERS / "kernels", WORKERS / "models"
# NumPy is the same there; Triton and what drives a GPU are not in it.
WITHOUT_NUMPY = ("-k", "not numpy")
# What a CPU without units for a dtype cannot show; nothing else is skipped in that environment.
UNITS_ARE_MISSING = "has no native"

SUITES = {
    "devices": (
        HERE / "test_xla.py",
        HERE / "test_cpu_engines.py",
        HERE / "test_options.py",
        HERE / "test_users_loops.py",
        MODELS / "optimizers" / "test_optimizer.py",
        *(MODELS / "memory").glob("test_*.py"),
        HERE.parents[2] / "examples" / "test_back_end_examples.py",
        HERE.parent / "libraries" / "test_libraries.py",
        HERE.parent / "capability" / "test_matrix.py",
        MODELS / "validation" / "test_validate.py",
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


@pytest.mark.parametrize("suite", SUITES, ids=str)
def test_the_suite_passes_where_torch_xla_and_ipex_are(suite, tmp_path):
    skipped = run_tests(SUITES[suite], tmp_path)
    assert all(UNITS_ARE_MISSING in line for line in skipped) or suite != "devices", skipped

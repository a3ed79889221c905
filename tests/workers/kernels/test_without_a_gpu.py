"""`-m gpu` on a machine without a GPU: its tests are collected without Ray and pydantic, and skipped with a reason."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[3]
FILES = ("tests/workers/kernels/test_contract.py", "tests/workers/kernels/test_gradients.py")
RUN = """
import sys
sys.modules.update(ray=None, pydantic=None)  # an import of either is an ImportError
import pytest
sys.exit(pytest.main(["-m", "gpu", "-q", "-rs", "-n0", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def test_the_tests_of_a_gpu_are_collected_and_skipped_with_words():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "POLYFLEET_TESTS_NEED": "", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, *FILES], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert "skipped" in last and "passed" not in last and "deselected" in last, done.stdout[-3000:]
    assert "torch finds no GPU of NVIDIA, AMD or Intel here" in done.stdout
    assert "torch finds no GPU of NVIDIA or AMD here" in done.stdout

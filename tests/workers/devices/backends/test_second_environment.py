"""The contract of back ends in the second environment: torch_xla and IPEX are real there, and run on the CPU."""

from pathlib import Path

import pytest
from second_environment import run_tests

pytestmark = [pytest.mark.xla, pytest.mark.timeout(300)]

HERE = Path(__file__).parent
OF_ANY_ENVIRONMENT = ("the_product_calls_the_functions", "a_misspelt_name_is_answered")
"""What these find is the same in each, and they take seconds."""


def test_the_contract_is_kept_where_torch_xla_and_ipex_are(tmp_path):
    files = (HERE / "test_contract.py", HERE / "test_user_methods.py", HERE / "test_xla.py")
    skipped = run_tests((*files, "-k", " and ".join(f"not {name}" for name in OF_ANY_ENVIRONMENT)), tmp_path)
    assert all("has no native" in line for line in skipped), skipped

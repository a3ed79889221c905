"""Seeds for tests: each test draws the same random numbers in every run, so that a failure can be repeated."""

import os
import random
import sys
import zlib

import pytest
import schedule


class Draws:
    """Seeds Python, NumPy and torch before each test and its fixtures, where the process has imported them."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        seed = zlib.crc32(f"{os.environ.get(schedule.SEED, '')} {item.nodeid}".encode())
        random.seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed)
        if torch := sys.modules.get("torch"):
            torch.default_generator.manual_seed(seed)

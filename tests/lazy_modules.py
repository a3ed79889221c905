"""Modules that a few tests use and that take long to import, imported by the first of these tests.

Every process of tests imports every file of tests. What these modules need, it would need in each process.
"""

from importlib import import_module
from typing import Any


class LazyModule:
    """`dcp = LazyModule("torch.distributed.checkpoint")`: imported when a test reads an attribute of it."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith(("_", "pytest")):  # pytest asks everything in a file of tests what it is
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)

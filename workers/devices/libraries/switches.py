"""Switches of libraries in the running process. Reading or setting one imports torch.

They change only `enabled`: torch.backends.mkldnn.flags() would also reset precision and determinism, and
set_flags(deterministic=True) switches oneDNN off (its default for `enabled`).
"""

import importlib
from typing import Any

from workers.devices.libraries.library import Switch


def _module(name: str) -> Any:
    return importlib.import_module(f"torch.backends.{name}")


def _property(name: str) -> Switch:
    """Make the switch of a module whose `enabled` is a property."""
    return Switch(lambda: bool(_module(name).enabled), lambda on: setattr(_module(name), "enabled", on))


MKLDNN = _property("mkldnn")
CUDNN = _property("cudnn")
OPT_EINSUM = _property("opt_einsum")
NNPACK = Switch(
    lambda: bool(importlib.import_module("torch")._C._get_nnpack_enabled()),
    lambda on: _module("nnpack").set_flags(on),
)
MHA = Switch(lambda: bool(_module("mha").get_fastpath_enabled()), lambda on: _module("mha").set_fastpath_enabled(on))

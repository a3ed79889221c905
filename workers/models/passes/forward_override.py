"""Override the forward of one module such that a copy of the module computes with its own weights.

The module's class, names and state dict do not change. `forward` becomes a bound method, which `deepcopy` binds to the
copy; a closure over the old forward would continue to compute with the old module.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

RUN, ORIGINAL = "_polyfleet_run", "_polyfleet_forward_before"


def override(module: nn.Module, run: Callable[..., Any]) -> None:
    """Replace the module's forward by `run(call, *args, **kwargs)`, where `call` is the original forward.

    `deepcopy` must copy `run` correctly: it is a module-level function, or an object that holds no nn.Module.
    """
    restore(module)
    before = module.__dict__.get("forward")
    module.__dict__.update({RUN: run, ORIGINAL: before, "forward": MethodType(forward, module)})


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    run, before = self.__dict__[RUN], self.__dict__[ORIGINAL]
    return run(before if before is not None else MethodType(type(self).forward, self), *args, **kwargs)


def restore(module: nn.Module) -> None:
    """Undo `override`. Does nothing for a module without one."""
    if module.__dict__.pop(RUN, None) is None:
        return
    del module.__dict__["forward"]
    before = module.__dict__.pop(ORIGINAL)
    if before is not None:
        module.__dict__["forward"] = before

"""Another forward for one module, in a way that survives copying: a copy runs its own weights, not those it came from.

The module's class, its names and its state dict stay what they are. `forward` becomes a bound method, which `deepcopy`
binds to the copy; a closure over the old forward would go on computing with the old module.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

RUN, BEFORE = "_polyfleet_run", "_polyfleet_forward_before"


def override(module: nn.Module, run: Callable[..., Any]) -> None:
    """`run(call, *args, **kwargs)` in the place of the module's forward, where `call` is that forward. `run` must be
    copied by `deepcopy` as it should be: a function of a file, or an object that holds no module.
    """
    restore(module)
    before = module.__dict__.get("forward")
    module.__dict__.update({RUN: run, BEFORE: before, "forward": MethodType(forward, module)})


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    run, before = self.__dict__[RUN], self.__dict__[BEFORE]
    return run(before if before is not None else MethodType(type(self).forward, self), *args, **kwargs)


def restore(module: nn.Module) -> None:
    """Undo to `override`; nothing on a module that has none."""
    if module.__dict__.pop(RUN, None) is None:
        return
    del module.__dict__["forward"]
    before = module.__dict__.pop(BEFORE)
    if before is not None:
        module.__dict__["forward"] = before

"""All cases, by name. Models have the shapes of models in common use; `quick` ones suit a CPU."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from cluster.errors import NotFound, nearest
from workers.benchmark.cases.case import QUICK, SCALES, Case, Definition
from workers.benchmark.cases.models import MODELS
from workers.benchmark.cases.operations import KERNEL_OPERATIONS, OPERATIONS, TRANSFERS

DEFINITIONS: dict[str, Definition] = {d.name: d for d in (*OPERATIONS, *TRANSFERS, *MODELS)}
SUITES = ("all", "operations", "models", "transfers", "kernels", "backward", "smoke")
_SMOKE = ("matmul", "rmsnorm", "attention", "memory-copy", "mlp")
_FAMILIES = {"operations": "operation", "models": "model", "transfers": "transfer"}


def cases(scale: str = QUICK) -> tuple[Case, ...]:
    """Return all cases of one scale, in the order of the catalogue."""
    if scale not in SCALES:
        raise NotFound(f"no scale {scale!r}", nearest(scale, SCALES))
    return tuple(
        Case(definition, sizes, mode)
        for definition in DEFINITIONS.values()
        for sizes in definition.shapes[scale]
        for mode in modes(definition, sizes)
    )


def modes(definition: Definition, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the modes of a workload: models are also trained, except a decoder that generates token by token."""
    if definition.backward is not None:
        return "forward", "backward"
    return ("forward", "train") if definition.family == "model" and "cached" not in sizes else ("forward",)


def choose(patterns: Iterable[str], scale: str = QUICK) -> tuple[Case, ...]:
    """Select cases by suite (`operations`), workload (`gpt2`), name (`gpt2/train/b1-t128`) or pattern (`*/train/*`).

    Gradients of operations are selected by `backward`, `softmax/backward`, their names and patterns only.
    Raises NotFound, with the nearest names, for a pattern that matches nothing.
    """
    available = cases(scale)
    chosen: dict[str, Case] = {}
    for pattern in patterns:
        matches = [case for case in available if _matches(pattern, case)]
        if not matches:
            names = (*SUITES, *DEFINITIONS, *(case.name for case in available))
            raise NotFound(f"no case or suite {pattern!r}", nearest(pattern, names))
        chosen.update((case.name, case) for case in matches)
    return tuple(chosen.values())


def find(name: str) -> Case:
    """Return the case with exactly this name, in either scale. Raises NotFound."""
    for scale in SCALES:
        for case in cases(scale):
            if case.name == name:
                return case
    raise NotFound(f"no case {name!r}", nearest(name, [c.name for scale in SCALES for c in cases(scale)]))


def _matches(pattern: str, case: Case) -> bool:
    definition = case.definition
    if case.mode == "backward":
        return pattern == case.mode or _names(pattern, case)
    if pattern == "all":
        return True
    if pattern == "smoke":
        return definition.name in _SMOKE and (case.mode == "forward" or definition.name == "mlp")
    if pattern == "kernels":
        return definition.name in KERNEL_OPERATIONS
    if pattern in _FAMILIES:
        return definition.family == _FAMILIES[pattern]
    return pattern == definition.name or _names(pattern, case)


def _names(pattern: str, case: Case) -> bool:
    is_start = "/" in pattern and case.name.startswith(f"{pattern}/")
    return is_start or case.name == pattern or fnmatchcase(case.name, pattern)

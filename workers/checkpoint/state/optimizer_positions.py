"""Match numbered parameters with live ones by position, as torch does, and check their shapes."""

import torch

from workers.checkpoint.format.optimizer_tree import SHAPED_LIKE_PARAMETER, Key, OptimizerTree
from workers.checkpoint.state.load_stage import LoadStage
from workers.checkpoint.state.modules import LiveModules
from workers.errors import CheckpointError

Pairs = list[tuple[Key, torch.Tensor]]


def by_position(
    stage: LoadStage, entry: str, saved: OptimizerTree, groups: list[list[torch.Tensor]], live: LiveModules
) -> list[Pairs]:
    """Pair each live parameter with its number, by group. If positions do not fit, use names derived at the import.

    Raises CheckpointError if neither fits.
    """
    fault = _mismatch(stage, saved, groups, live)
    if not fault:
        stage.report.notes.append(
            f"entry {entry!r}: parameters were matched by position, as torch does{_unchecked_text(saved, groups, live)}"
        )
        return [list(zip(keys, group, strict=True)) for keys, group in zip(saved.groups, groups, strict=True)]
    keys = {name: key for key, name in saved.names.items()}
    names = [[live.names.get(id(parameter), "") for parameter in group] for group in groups]
    if not keys or {name for group in names for name in group} != set(keys):
        raise CheckpointError(
            f"entry {entry!r}: {fault}", "build the optimizer with the groups that were saved, in the same order"
        )
    stage.report.notes.append(
        f"entry {entry!r}: parameters were matched by name; the names follow from shapes and order in the imported file"
    )
    return [
        [(keys[name], parameter) for name, parameter in zip(group_names, group, strict=True)]
        for group_names, group in zip(names, groups, strict=True)
    ]


def _mismatch(stage: LoadStage, saved: OptimizerTree, groups: list[list[torch.Tensor]], live: LiveModules) -> str:
    sizes = [len(keys) for keys in saved.groups], [len(group) for group in groups]
    if sizes[0] != sizes[1]:
        return f"its groups have {_size_list(sizes[0])} parameters, those of the live optimizer {_size_list(sizes[1])}"
    for keys, group in zip(saved.groups, groups, strict=True):
        for key, parameter in zip(keys, group, strict=True):
            for slot, leaf in saved.state.get(key, {}).items():
                tensor = leaf.get("$tensor") if isinstance(leaf, dict) else None
                if slot not in SHAPED_LIKE_PARAMETER or tensor is None or stage.shape(tensor) == tuple(parameter.shape):
                    continue
                name = live.names.get(id(parameter), "the live parameter")
                return (
                    f"parameter {key} has {slot} of shape {list(stage.shape(tensor))}, and {name}, at its position in"
                    f" the live optimizer, has the shape {list(parameter.shape)}"
                )
    return ""


def _unchecked_text(saved: OptimizerTree, groups: list[list[torch.Tensor]], live: LiveModules) -> str:
    """Describe what was not checked: parameters whose state has no shape, and an unusual order."""
    names = [live.names.get(id(parameter), "") for group in groups for parameter in group]
    different = sum(saved.names.get(key, name) != name for key, name in zip(saved.keys, names, strict=True) if name)
    unchecked = sum(not SHAPED_LIKE_PARAMETER & set(saved.state.get(key, ())) for key in saved.keys)
    message = f"; {unchecked} of {len(names)} have no state that shows their shape" if unchecked else ""
    return message + (
        f"; by the model's order, {different} of {len(names)} would be different ones" if different else ""
    )


def _size_list(sizes: list[int]) -> str:
    more = f" and {len(sizes) - 6} groups more" if len(sizes) > 6 else ""
    return ", ".join(map(str, sizes[:6])) + more

"""Numbered parameters meet live ones by their place in the groups, as in load_state_dict of torch, shapes checked."""

import torch

from workers.checkpoint.format.optimizer_tree import SHAPED_LIKE_PARAMETER, Key, OptimizerTree
from workers.checkpoint.state.load_stage import LoadStage
from workers.checkpoint.state.modules import LiveModules
from workers.errors import CheckpointError

Pairs = list[tuple[Key, torch.Tensor]]


def by_position(
    stage: LoadStage, entry: str, saved: OptimizerTree, groups: list[list[torch.Tensor]], live: LiveModules
) -> list[Pairs]:
    """Each live parameter with its number, group by group. Where places do not fit, names that were worked out may.

    Raises CheckpointError where neither fits.
    """
    fault = _misfit(stage, saved, groups, live)
    if not fault:
        stage.report.notes.append(
            f"entry {entry!r}: parameters were matched by position, as torch does{_doubts(saved, groups, live)}"
        )
        return [list(zip(keys, group, strict=True)) for keys, group in zip(saved.groups, groups, strict=True)]
    keys = {name: key for key, name in saved.names.items()}
    names = [[live.names.get(id(parameter), "") for parameter in group] for group in groups]
    if not keys or {name for group in names for name in group} != set(keys):
        raise CheckpointError(
            f"entry {entry!r}: {fault}", "build the optimizer with the groups it had, in the same order"
        )
    stage.report.notes.append(
        f"entry {entry!r}: parameters were matched by name; the names follow from shapes and order in the imported file"
    )
    return [
        [(keys[name], parameter) for name, parameter in zip(told, group, strict=True)]
        for told, group in zip(names, groups, strict=True)
    ]


def _misfit(stage: LoadStage, saved: OptimizerTree, groups: list[list[torch.Tensor]], live: LiveModules) -> str:
    sizes = [len(keys) for keys in saved.groups], [len(group) for group in groups]
    if sizes[0] != sizes[1]:
        return f"its groups have {_listed(sizes[0])} parameters, those of the live optimizer {_listed(sizes[1])}"
    for keys, group in zip(saved.groups, groups, strict=True):
        for key, parameter in zip(keys, group, strict=True):
            for slot, leaf in saved.state.get(key, {}).items():
                tensor = leaf.get("$tensor") if isinstance(leaf, dict) else None
                if slot not in SHAPED_LIKE_PARAMETER or tensor is None or stage.shape(tensor) == tuple(parameter.shape):
                    continue
                name = live.names.get(id(parameter), "the live parameter")
                return (
                    f"parameter {key} has {slot} of shape {list(stage.shape(tensor))}, and {name}, at its place in the"
                    f" live optimizer, has the shape {list(parameter.shape)}"
                )
    return ""


def _doubts(saved: OptimizerTree, groups: list[list[torch.Tensor]], live: LiveModules) -> str:
    """What nothing has shown to be right: shapes that no state tells, and another order than most programs keep."""
    names = [live.names.get(id(parameter), "") for group in groups for parameter in group]
    other = sum(saved.names.get(key, name) != name for key, name in zip(saved.keys, names, strict=True) if name)
    untold = sum(not SHAPED_LIKE_PARAMETER & set(saved.state.get(key, ())) for key in saved.keys)
    says = f"; {untold} of {len(names)} have no state that tells their shape" if untold else ""
    return says + (f"; by the model's order, {other} of {len(names)} would be different ones" if other else "")


def _listed(sizes: list[int]) -> str:
    more = f" and {len(sizes) - 6} groups more" if len(sizes) > 6 else ""
    return ", ".join(map(str, sizes[:6])) + more

"""What a `prepare` job kept, in a script again: the user's model in the form its tensors have, and those in it.

An artefact is a checkpoint of step 0: the tensors of the prepared model, and in its entry `extra` what was done to get
there. Folding is the one pass that changes which tensors there are; compiling is done anew where the model is loaded.
"""

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cluster.errors import UserError
from workers.checkpoint import load, open_checkpoint
from workers.checkpoint.format import tree
from workers.optimizers.pass_context import PreparedModel, deep_copy
from workers.optimizers.passes import unwrap

if TYPE_CHECKING:
    from workers.backends.base import BaseBackend

FOLDABLE = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def artefact(prepared: PreparedModel, entry: str, report: dict[str, Any]) -> dict[str, Any]:
    """The state to save. `prepared` must have no pass that changes its tensors but folding: level O1 at most."""
    rebuild = {"folded": [list(pair) for pair in prepared.folded], "precision": report["precision"]}
    return {"model": unwrap(prepared.model), "extra": {"entry": entry, "report": report, "rebuild": rebuild}}


def load_prepared(
    path: str | os.PathLike[str],
    model: nn.Module,
    backend: "BaseBackend | str | None" = None,
    *,
    level: str | None = None,
    sample_input: Any = None,
) -> nn.Module:
    """The prepared model of a `prepare` job's artefact, on a device and in eval mode.

    `model` is what the job's factory returns, its weights do not matter; it is left as it was. `backend` is one, its
    name, or None for the best that is here; `level` is how far to prepare it here, None for that of the job. Raises
    UserError for a checkpoint that no `prepare` job made, and for a model of another structure.
    """
    from workers.selection.factory import get_backend

    told = _told(path)
    mine = deep_copy(model).eval()
    _refold(mine, told["rebuild"]["folded"])
    load(path, into={"model": mine})
    device = get_backend(backend) if backend is None or isinstance(backend, str) else backend
    return device.prepare_model(mine, level or told["report"]["level"], sample_input, told["rebuild"]["precision"])


def _told(path: str | os.PathLike[str]) -> dict[str, Any]:
    with open_checkpoint(path) as opened:
        found = opened.manifest.entries.get("extra")
        told = tree.decode(found.tree, lambda name, _: name) if found is not None else {}
    if not isinstance(told, dict) or not {"rebuild", "report"} <= set(told):
        raise UserError(f"{path} was not made by a prepare job", "load it with workers.checkpoint.load")
    return told


def _refold(model: nn.Module, folded: list[list[str]]) -> None:
    """Convolutions get the bias that a folded norm gave them; the norms are no more."""
    for conv_name, norm_name in folded:
        try:
            conv, _ = model.get_submodule(conv_name), model.get_submodule(norm_name)
        except AttributeError as e:
            raise UserError(
                f"the model is not the one that was prepared: {e}", "give what the prepare job's entry returns"
            ) from e
        if not isinstance(conv, FOLDABLE):
            raise UserError(
                f"the model is not the one that was prepared: {conv_name} is a {type(conv).__name__}",
                "give what the prepare job's entry returns",
            )
        if conv.bias is None:
            conv.bias = nn.Parameter(torch.zeros(conv.out_channels, dtype=conv.weight.dtype))
        parent, _, leaf = norm_name.rpartition(".")
        setattr(model.get_submodule(parent) if parent else model, leaf, nn.Identity())

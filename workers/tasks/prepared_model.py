"""Save the model of a `prepare` job, and load it in a script.

An artefact is a checkpoint of step 0: the tensors of the prepared model, and in its entry `extra` how it was prepared.
Only folding changes which tensors there are; the model is compiled again where it is loaded.
"""

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cluster.errors import UserError
from workers.checkpoint import load, open_checkpoint
from workers.checkpoint.format import tree
from workers.models import compat
from workers.models.optimizers.passes import unwrap
from workers.models.passes.pass_context import PreparedModel, deep_copy

if TYPE_CHECKING:
    from workers.devices.backends.base import BaseBackend

FOLDABLE = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def artefact_state(prepared: PreparedModel, entry: str, report: dict[str, Any]) -> dict[str, Any]:
    """Return the state to save. Folding must be the only pass that changed tensors of `prepared`: level O1 at most."""
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
    """Load the model from a `prepare` job's artefact, on a device and in eval mode.

    `model` is what the job's factory returns, with any weights; it is not changed. `backend` is a back end, its name,
    or None for the best of this machine; `level` is the level to prepare it with here (None: the job's). Raises
    UserError for a checkpoint that was not made by a `prepare` job, and for a model with another structure.
    """
    from workers.devices.selection.factory import get_backend

    record = _read_record(path)
    own_model = deep_copy(model).eval()
    _apply_folding(own_model, record["rebuild"]["folded"])
    load(path, into={"model": own_model})
    device = get_backend(backend) if backend is None or isinstance(backend, str) else backend
    return compat.prepare_model(
        device, own_model, level or record["report"]["level"], sample_input, record["rebuild"]["precision"]
    )


def _read_record(path: str | os.PathLike[str]) -> dict[str, Any]:
    with open_checkpoint(path) as opened:
        entry = opened.manifest.entries.get("extra")
        record = tree.decode(entry.tree, lambda name, _: name) if entry is not None else {}
    if not isinstance(record, dict) or not {"rebuild", "report"} <= set(record):
        raise UserError(f"{path} was not made by a prepare job", "load it with workers.checkpoint.load")
    return record


def _apply_folding(model: nn.Module, folded: list[list[str]]) -> None:
    """Give convolutions the bias that comes from a folded norm, and replace the norms by Identity."""
    for conv_name, norm_name in folded:
        try:
            conv, _ = model.get_submodule(conv_name), model.get_submodule(norm_name)
        except AttributeError as e:
            raise UserError(
                f"the model is not the one that was prepared: {e}",
                "pass the model that the prepare job's entry returns",
            ) from e
        if not isinstance(conv, FOLDABLE):
            raise UserError(
                f"the model is not the one that was prepared: {conv_name} is a {type(conv).__name__}",
                "pass the model that the prepare job's entry returns",
            )
        if conv.bias is None:
            conv.bias = nn.Parameter(torch.zeros(conv.out_channels, dtype=conv.weight.dtype))
        parent, _, leaf = norm_name.rpartition(".")
        setattr(model.get_submodule(parent) if parent else model, leaf, nn.Identity())

"""Checkpoints that cross vendors: plain safetensors and a manifest, verified, never pickled. format/manifest.py has the
format, docs/checkpoint-format.md the same in prose.

Importing this imports no torch; what needs it does when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.checkpoint.background import Saver as Saver
    from workers.checkpoint.background import Saving as Saving
    from workers.checkpoint.converting import convert as convert
    from workers.checkpoint.diffing import diff as diff
    from workers.checkpoint.disk.pins import pin as pin
    from workers.checkpoint.disk.pins import unpin as unpin
    from workers.checkpoint.exchange.exporting import export_checkpoint as export_checkpoint
    from workers.checkpoint.exchange.importing import import_checkpoint as import_checkpoint
    from workers.checkpoint.format.manifest import DamagedCheckpoint as DamagedCheckpoint
    from workers.checkpoint.inspect import Latest as Latest
    from workers.checkpoint.inspect import describe as describe
    from workers.checkpoint.inspect import latest as latest
    from workers.checkpoint.inspect import list_checkpoints as list_checkpoints
    from workers.checkpoint.inspect import verify as verify
    from workers.checkpoint.loading import Loaded as Loaded
    from workers.checkpoint.loading import load as load
    from workers.checkpoint.opening import OpenCheckpoint as OpenCheckpoint
    from workers.checkpoint.opening import open_checkpoint as open_checkpoint
    from workers.checkpoint.planning import plan as plan
    from workers.checkpoint.policy import LossyLoad as LossyLoad
    from workers.checkpoint.pruning import prune as prune
    from workers.checkpoint.report import Report as Report
    from workers.checkpoint.saving import Saved as Saved
    from workers.checkpoint.saving import save as save
    from workers.checkpoint.transfer.copying import copy as copy

_WHERE = {
    **dict.fromkeys(("Saver", "Saving"), "background"),
    "convert": "converting",
    "diff": "diffing",
    **dict.fromkeys(("pin", "unpin"), "disk.pins"),
    "prune": "pruning",
    "export_checkpoint": "exchange.exporting",
    "import_checkpoint": "exchange.importing",
    "DamagedCheckpoint": "format.manifest",
    **dict.fromkeys(("Latest", "describe", "latest", "list_checkpoints", "verify"), "inspect"),
    **dict.fromkeys(("Loaded", "load"), "loading"),
    **dict.fromkeys(("OpenCheckpoint", "open_checkpoint"), "opening"),
    "plan": "planning",
    "LossyLoad": "policy",
    "Report": "report",
    **dict.fromkeys(("Saved", "save"), "saving"),
    "copy": "transfer.copying",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)

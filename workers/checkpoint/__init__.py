"""Checkpoints that any vendor's devices can load: safetensors and a manifest, verified, never pickled.

format/manifest.py defines the format; docs/checkpoint-format.md describes it in prose. Importing this package does not
import torch: names are loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.checkpoint.background_saver import BackgroundSaver as BackgroundSaver
    from workers.checkpoint.background_saver import SaveInProgress as SaveInProgress
    from workers.checkpoint.comparer import diff as diff
    from workers.checkpoint.converter import convert as convert
    from workers.checkpoint.disk.pins import pin as pin
    from workers.checkpoint.disk.pins import unpin as unpin
    from workers.checkpoint.dtype_policy import LossyLoad as LossyLoad
    from workers.checkpoint.exchange.exporter import export_checkpoint as export_checkpoint
    from workers.checkpoint.exchange.importer import import_checkpoint as import_checkpoint
    from workers.checkpoint.format.manifest import DamagedCheckpoint as DamagedCheckpoint
    from workers.checkpoint.inspect import Latest as Latest
    from workers.checkpoint.inspect import describe as describe
    from workers.checkpoint.inspect import latest as latest
    from workers.checkpoint.inspect import list_checkpoints as list_checkpoints
    from workers.checkpoint.inspect import verify as verify
    from workers.checkpoint.lazy_reader import OpenCheckpoint as OpenCheckpoint
    from workers.checkpoint.lazy_reader import open_checkpoint as open_checkpoint
    from workers.checkpoint.load_report import LoadReport as LoadReport
    from workers.checkpoint.loader import Loaded as Loaded
    from workers.checkpoint.loader import load as load
    from workers.checkpoint.move_plan import plan as plan
    from workers.checkpoint.pruner import prune as prune
    from workers.checkpoint.saver import Saved as Saved
    from workers.checkpoint.saver import save as save
    from workers.checkpoint.transfer.copier import copy as copy

_HOME_OF = {
    **dict.fromkeys(("BackgroundSaver", "SaveInProgress"), "background_saver"),
    "convert": "converter",
    "diff": "comparer",
    **dict.fromkeys(("pin", "unpin"), "disk.pins"),
    "prune": "pruner",
    "export_checkpoint": "exchange.exporter",
    "import_checkpoint": "exchange.importer",
    "DamagedCheckpoint": "format.manifest",
    **dict.fromkeys(("Latest", "describe", "latest", "list_checkpoints", "verify"), "inspect"),
    **dict.fromkeys(("Loaded", "load"), "loader"),
    **dict.fromkeys(("OpenCheckpoint", "open_checkpoint"), "lazy_reader"),
    "plan": "move_plan",
    "LossyLoad": "dtype_policy",
    "LoadReport": "load_report",
    **dict.fromkeys(("Saved", "save"), "saver"),
    "copy": "transfer.copier",
}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)

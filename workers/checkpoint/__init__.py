"""Checkpoints that any vendor's devices can load: safetensors and a manifest, verified, never pickled.

format/manifest.py defines the format; docs/checkpoint-format.md describes it in prose. Importing this package does not
import torch: names are loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.checkpoint.conversion.dtype_policy import LossyLoad as LossyLoad
    from workers.checkpoint.conversion.load_report import LoadReport as LoadReport
    from workers.checkpoint.conversion.move_plan import plan as plan
    from workers.checkpoint.disk.inspect import Latest as Latest
    from workers.checkpoint.disk.inspect import describe as describe
    from workers.checkpoint.disk.inspect import latest as latest
    from workers.checkpoint.disk.inspect import list_checkpoints as list_checkpoints
    from workers.checkpoint.disk.inspect import verify as verify
    from workers.checkpoint.disk.pins import pin as pin
    from workers.checkpoint.disk.pins import unpin as unpin
    from workers.checkpoint.disk.pruner import prune as prune
    from workers.checkpoint.exchange.dcp_reader import PolyfleetStorageReader as PolyfleetStorageReader
    from workers.checkpoint.exchange.dcp_writer import PolyfleetStorageWriter as PolyfleetStorageWriter
    from workers.checkpoint.exchange.exporter import export_checkpoint as export_checkpoint
    from workers.checkpoint.exchange.importer import import_checkpoint as import_checkpoint
    from workers.checkpoint.format.manifest import DamagedCheckpoint as DamagedCheckpoint
    from workers.checkpoint.loading.comparer import diff as diff
    from workers.checkpoint.loading.converter import convert as convert
    from workers.checkpoint.loading.lazy_reader import OpenCheckpoint as OpenCheckpoint
    from workers.checkpoint.loading.lazy_reader import open_checkpoint as open_checkpoint
    from workers.checkpoint.loading.loader import Loaded as Loaded
    from workers.checkpoint.loading.loader import load as load
    from workers.checkpoint.saving.background_saver import BackgroundSaver as BackgroundSaver
    from workers.checkpoint.saving.background_saver import SaveInProgress as SaveInProgress
    from workers.checkpoint.saving.saver import Saved as Saved
    from workers.checkpoint.saving.saver import save as save
    from workers.checkpoint.transfer.copier import copy as copy

_HOME_OF = {
    **dict.fromkeys(("BackgroundSaver", "SaveInProgress"), "saving.background_saver"),
    "convert": "loading.converter",
    "diff": "loading.comparer",
    **dict.fromkeys(("pin", "unpin"), "disk.pins"),
    "prune": "disk.pruner",
    "export_checkpoint": "exchange.exporter",
    "import_checkpoint": "exchange.importer",
    "DamagedCheckpoint": "format.manifest",
    **dict.fromkeys(("Latest", "describe", "latest", "list_checkpoints", "verify"), "disk.inspect"),
    **dict.fromkeys(("Loaded", "load"), "loading.loader"),
    **dict.fromkeys(("OpenCheckpoint", "open_checkpoint"), "loading.lazy_reader"),
    "plan": "conversion.move_plan",
    "LossyLoad": "conversion.dtype_policy",
    "LoadReport": "conversion.load_report",
    **dict.fromkeys(("Saved", "save"), "saving.saver"),
    "copy": "transfer.copier",
    "PolyfleetStorageReader": "exchange.dcp_reader",
    "PolyfleetStorageWriter": "exchange.dcp_writer",
}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)

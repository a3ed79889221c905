"""Checkpoints from Python: `o.checkpoints` has a method for each command of `polyfleet checkpoint`."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from cluster.errors import FleetError, SpecError
from orchestrator.client import client as http
from orchestrator.client.checkpoint_tools import CheckpointTools
from orchestrator.client.server_connection import Bytes
from orchestrator.show import checkpoints as show
from orchestrator.show.notebook_views import KeyValueView, TableView

Data = dict[str, Any]


def _quiet(done: int, total: int) -> None:
    """Discard progress: the default when the caller passes no callback."""


class Checkpoints:
    """Checkpoints in the pools' storage, in folders of this machine and in object stores. A location is POOL:PATH, a
    path (a path with a colon must be absolute or begin with `./` or `~`), a URI, or a job whose checkpoints are in one
    pool. `progress` receives bytes done and bytes in total.
    """

    def __init__(self, client: http.Client):
        self._client = client

    def list(self, pool: str = "", prefix: str = "") -> TableView:
        """List checkpoints. Raises FleetError if there are none, but unreachable nodes may have some."""
        rows = self._client.checkpoints.list(pool=pool, prefix=prefix)
        if not rows and (away := self._client.checkpoints.away(pool=pool)):
            raise FleetError("; ".join(away), "`polyfleet up` brings back a node that is down")
        return TableView(rows, show.checkpoints)

    def show(self, ref: str) -> KeyValueView:
        """Show what a checkpoint contains: producer, step, tensors, bytes."""
        return KeyValueView(self._tools().show(ref), show.describe_table)

    def verify(self, ref: str, progress: Bytes | None = None) -> KeyValueView:
        """Read every byte and compare with the manifest's hashes."""
        return KeyValueView(self._run("verify", {"place": ref}, progress), show.verified)

    def plan(self, ref: str, to_kind: str, count: int = 1) -> KeyValueView:
        """Describe what devices of another kind would keep, convert or refuse, and whether the checkpoint fits."""
        return KeyValueView(self._tools().plan(ref, to_kind, count), show.planned)

    def copy(
        self, source: str, target: str, to_kind: str = "", on_lossy: str = "error", progress: Bytes | None = None
    ) -> KeyValueView:
        """Copy between pools, folders of this machine and object stores, and verify the copy. Only missing chunks are
        sent, so an interrupted copy resumes. Between pools and stores, `to_kind` converts the checkpoint first.
        """
        options = {"to_kind": to_kind, "on_lossy": on_lossy}
        return KeyValueView(self._tools(progress).copy(source, target, options), show.copied)

    def diff(self, a: str, b: str, progress: Bytes | None = None) -> KeyValueView:
        """Compare two checkpoints tensor by tensor."""
        return KeyValueView(self._run("diff", {"a": a, "b": b}, progress), show.differences)

    def convert(
        self,
        source: str,
        target: str,
        to_kind: str = "",
        on_lossy: str = "error",
        progress: Bytes | None = None,
        *,
        dtype: Mapping[str, str] | None = None,
    ) -> KeyValueView:
        """Write a copy to a folder of the same pool or machine, in the dtypes that a kind computes with, or in those
        that `dtype` names: {"float32": "bfloat16"}, or with a pattern of tensor names instead of a dtype.
        """
        if not to_kind and not dtype:
            raise SpecError("to_kind", "the target of the conversion is missing", "add to_kind or dtype")
        options = _without_none(to_kind=to_kind or None, dtype=dict(dtype) if dtype else None, on_lossy=on_lossy)
        return KeyValueView(
            self._run("convert", {"source": source, "root": target}, progress, options), show.conversion
        )

    def import_(
        self,
        source: str,
        target: str = "",
        *,
        format: str = "",  # noqa: A002 - as on the command line
        step: int | None = None,
        drop: bool = False,
        progress: Bytes | None = None,
    ) -> KeyValueView:
        """Import safetensors, a torch.save file, or a folder of DCP, Accelerate or the Trainer as a checkpoint in a
        pool or on this machine. A file of this machine is sent to the pool of `target`. No code in it is run.
        `left_out` of the result has name and reason of each part that was not imported.
        """
        options = _without_none(format=format or None, step=step, drop=drop or None)
        return KeyValueView(self._tools(progress).import_(source, target, options), show.imported)

    def export(
        self,
        source: str,
        target: str,
        *,
        format: str = "safetensors",  # noqa: A002 - as on the command line
        entry: str = "",
        progress: Bytes | None = None,
    ) -> KeyValueView:
        """Write a checkpoint in the format of another tool: safetensors, torch, dcp, accelerate or trainer."""
        options = _without_none(format=format, entry=entry or None)
        return KeyValueView(self._run("export", {"source": source, "target": target}, progress, options), show.exported)

    def prune(self, root: str, keep: int, dry_run: bool = False) -> KeyValueView:
        """Delete all but the newest `keep` verified checkpoints of a folder."""
        return KeyValueView(self._run("prune", {"root": root}, None, {"keep": keep, "dry_run": dry_run}), show.pruned)

    def pin(self, ref: str, remove: bool = False) -> KeyValueView:
        """Protect a checkpoint from deletion by `keep` and `prune`. `remove` removes the pin."""
        return KeyValueView(self._run("pin", {"path": ref}, None, {"remove": remove}), show.pinned)

    def _run(
        self, verb: str, locations: dict[str, str], progress: Bytes | None = None, options: Data | None = None
    ) -> Data:
        return dict(self._tools(progress).run(verb, locations, options))

    def _tools(self, progress: Bytes | None = None) -> CheckpointTools:
        return CheckpointTools(lambda start=True: nullcontext(self._client), progress or _quiet)


def _without_none(**options: Any) -> Data:
    return {name: value for name, value in options.items() if value is not None}

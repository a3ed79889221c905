"""Checkpoints from Python: `o.checkpoints` has a method for each command of `polyfleet checkpoint`."""

from collections.abc import Mapping
from typing import Any

from cluster.errors import FleetError, SpecError
from orchestrator.client import client as http
from orchestrator.client.checkpoint_transfer import run_tool
from orchestrator.client.server_connection import Bytes
from orchestrator.show import checkpoints as show
from orchestrator.show.notebook_views import KeyValueView, TableView
from orchestrator.show.table import facts
from orchestrator.spec.checkpoint_address import (
    are_all_local,
    checkpoint_arguments,
    expand_user,
    is_between_machine_and_pool,
    is_local,
    resolve_job,
)

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
        ref = resolve_job(self._client, ref)
        local = is_local(ref)
        summary: Mapping[str, Any] = (
            _run_locally("show", {"path": ref}) if local else self._client.checkpoints.show(ref)
        )
        return KeyValueView(summary, show.describe_table)

    def verify(self, ref: str, progress: Bytes | None = None) -> KeyValueView:
        """Read every byte and compare with the manifest's hashes."""
        return KeyValueView(self._run("verify", {"place": ref}, progress), show.verified)

    def plan(self, ref: str, to_kind: str, count: int = 1) -> KeyValueView:
        """Describe what devices of another kind would keep, convert or refuse, and whether the checkpoint fits."""
        ref = resolve_job(self._client, ref)
        return KeyValueView(self._client.checkpoints.plan(ref, to_kind, count=count), show.planned)

    def copy(
        self, source: str, target: str, to_kind: str = "", on_lossy: str = "error", progress: Bytes | None = None
    ) -> KeyValueView:
        """Copy between pools, folders of this machine and object stores, and verify the copy. Only missing chunks are
        sent, so an interrupted copy resumes. Between pools and stores, `to_kind` converts the checkpoint first.
        """
        source = resolve_job(self._client, source)
        between = is_between_machine_and_pool(source, target)
        if between or are_all_local(source, target):
            if to_kind:
                raise SpecError(
                    "to_kind",
                    "a copy from or to this machine cannot be converted during the copy",
                    "convert it afterwards",
                )
            return KeyValueView(self._copy_locally(source, target, between, progress), show.copied)
        how: Data = {"to_kind": to_kind, "on_lossy": on_lossy}
        return KeyValueView(self._client.checkpoints.copy(source, target, **how, progress=progress), show.copied)

    def _copy_locally(self, source: str, target: str, between: bool, progress: Bytes | None) -> Data:
        from orchestrator.client import checkpoint_transfer

        if not between:
            return {"source": source, **_run_locally("copy", {"source": source, "target": target}, progress)}
        transfer = (
            checkpoint_transfer.upload_checkpoint if is_local(source) else checkpoint_transfer.download_checkpoint
        )
        return transfer(self._client, source, target, progress or _quiet)

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
        if target and is_local(source) and is_between_machine_and_pool(source, target):
            from orchestrator.client.checkpoint_transfer import import_local

            return KeyValueView(import_local(self._client, source, target, options, progress or _quiet), show.imported)
        locations = {"source": source} | ({"root": target} if target else {})
        return KeyValueView(self._run("import", locations, progress, options), show.imported)

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
        return KeyValueView(self._run("pin", {"path": ref}, None, {"remove": remove}), facts)

    def _run(
        self, verb: str, locations: dict[str, str], progress: Bytes | None = None, options: Data | None = None
    ) -> Data:
        """Run a tool on this machine if it can open all locations, else on a node."""
        locations = locations | {
            name: resolve_job(self._client, locations[name]) for name in checkpoint_arguments(verb)
        }
        arguments: Data = {**locations, **(options or {})}
        if are_all_local(*locations.values()):
            return _run_locally(verb, arguments, progress)
        return run_tool(self._client, verb, arguments, progress)


def _run_locally(verb: str, arguments: Data, progress: Bytes | None = None) -> Data:
    """Run a tool on this machine in a child process, so that this process does not import torch."""
    from workers.checkpoint.tools import run_in_child

    paths = {name: expand_user(value) for name, value in arguments.items()}
    result: Data = run_in_child(verb, paths, progress, follow_links=True)
    return result


def _without_none(**options: Any) -> Data:
    return {name: value for name, value in options.items() if value is not None}

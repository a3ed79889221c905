"""Checkpoints from Python, in the words of `polyfleet checkpoint`: `o.checkpoints`."""

from typing import Any

from cluster.errors import FleetError, SpecError
from orchestrator import client as http
from orchestrator.checkpoint_address import (
    all_local,
    between_here_and_a_pool,
    expanded,
    is_local,
    names_checkpoints,
    of_job,
)
from orchestrator.server_connection import Bytes
from orchestrator.show import checkpoints as show
from orchestrator.show.notebook_views import KeyValueView, TableView
from orchestrator.show.table import facts

Data = dict[str, Any]


def _quiet(done: int, total: int) -> None:
    """Progress nobody asked to see."""


class Checkpoints:
    """Checkpoints in the pools' storage, in folders of this machine and in object stores. A place is POOL:PATH, a path
    (absolute, `./…` or `~…` where it has a colon), a URI, or a job whose checkpoints one pool has; `progress` gets
    bytes done and bytes in all.
    """

    def __init__(self, client: http.Client):
        self._client = client

    def list(self, pool: str = "", prefix: str = "") -> TableView:
        """Raises FleetError where there may be some, and only on nodes that cannot be reached."""
        rows = self._client.checkpoints(pool, prefix)
        if not rows and (away := self._client.checkpoints_away(pool)):
            raise FleetError("; ".join(away), "`polyfleet up` brings back a node that is down")
        return TableView(rows, show.checkpoints)

    def show(self, ref: str) -> KeyValueView:
        ref = of_job(self._client, ref)
        told = _here("show", {"path": ref}) if is_local(ref) else self._client.checkpoint_show(ref)
        return KeyValueView(told, show.describe_table)

    def verify(self, ref: str, progress: Bytes | None = None) -> KeyValueView:
        """Read every byte and compare with the manifest's hashes."""
        return KeyValueView(self._run("verify", {"place": ref}, progress), show.verified)

    def plan(self, ref: str, to_kind: str, count: int = 1) -> KeyValueView:
        """What devices of another kind would keep, convert or refuse, and whether it fits."""
        return KeyValueView(self._client.checkpoint_plan(of_job(self._client, ref), to_kind, count), show.planned)

    def copy(
        self, source: str, target: str, to_kind: str = "", on_lossy: str = "error", progress: Bytes | None = None
    ) -> KeyValueView:
        """Copy between pools, folders of this machine and object stores, and verify there. Only what is missing
        travels, so that a copy that was cut goes on. Between pools and stores it is converted first for `to_kind`.
        """
        source = of_job(self._client, source)
        between = between_here_and_a_pool(source, target)
        if between or all_local(source, target):
            if to_kind:
                raise SpecError("to_kind", "a copy from or to this machine does not convert", "convert it afterwards")
            return KeyValueView(self._copied_here(source, target, between, progress), show.copied)
        order = {"source": source, "target": target, "to_kind": to_kind, "on_lossy": on_lossy}
        return KeyValueView(self._client.checkpoint_copy(order, progress), show.copied)

    def _copied_here(self, source: str, target: str, between: bool, progress: Bytes | None) -> Data:
        from orchestrator import checkpoint_transfer

        if not between:
            return {"source": source, **_here("copy", {"source": source, "target": target}, progress)}
        carry = checkpoint_transfer.up if is_local(source) else checkpoint_transfer.down
        return carry(self._client, source, target, progress or _quiet)

    def diff(self, a: str, b: str, progress: Bytes | None = None) -> KeyValueView:
        """What differs, tensor by tensor."""
        return KeyValueView(self._run("diff", {"a": a, "b": b}, progress), show.differences)

    def convert(
        self, source: str, target: str, to_kind: str, on_lossy: str = "error", progress: Bytes | None = None
    ) -> KeyValueView:
        """Write a copy in the dtypes that a kind computes with, into a folder of the same pool or machine."""
        options = {"to_kind": to_kind, "on_lossy": on_lossy}
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
        """Make a checkpoint of safetensors, a file of torch.save, a folder of DCP, Accelerate or the Trainer, in a
        pool or here. A file of this machine is sent to the pool of `target`. Nothing in it is run. `left_out` of the
        answer has name and reason of each part that was not taken.
        """
        options = _given(format=format or None, step=step, drop=drop or None)
        if target and is_local(source) and between_here_and_a_pool(source, target):
            from orchestrator.checkpoint_transfer import bring_in

            return KeyValueView(bring_in(self._client, source, target, options, progress or _quiet), show.imported)
        places = {"source": source} | ({"root": target} if target else {})
        return KeyValueView(self._run("import", places, progress, options), show.imported)

    def export(
        self,
        source: str,
        target: str,
        *,
        format: str = "safetensors",  # noqa: A002 - as on the command line
        entry: str = "",
        progress: Bytes | None = None,
    ) -> KeyValueView:
        """Write a checkpoint as other tools have them: safetensors, torch, dcp, accelerate or trainer."""
        options = _given(format=format, entry=entry or None)
        return KeyValueView(self._run("export", {"source": source, "target": target}, progress, options), show.exported)

    def prune(self, root: str, keep: int, dry_run: bool = False) -> KeyValueView:
        """Delete older checkpoints of a folder that newer, verified ones make superfluous."""
        return KeyValueView(self._run("prune", {"root": root}, None, {"keep": keep, "dry_run": dry_run}), show.pruned)

    def pin(self, ref: str, remove: bool = False) -> KeyValueView:
        """Keep a checkpoint for good: neither `keep` nor `prune` deletes it. `remove` takes the pin away."""
        return KeyValueView(self._run("pin", {"path": ref}, None, {"remove": remove}), facts)

    def _run(
        self, verb: str, named: dict[str, str], progress: Bytes | None = None, options: Data | None = None
    ) -> Data:
        """On this machine where all places are, else on a node."""
        named = named | {name: of_job(self._client, named[name]) for name in names_checkpoints(verb)}
        arguments: Data = {**named, **(options or {})}
        if all_local(*named.values()):
            return _here(verb, arguments, progress)
        return self._client.checkpoint_tool(verb, arguments, progress)


def _here(verb: str, arguments: Data, progress: Bytes | None = None) -> Data:
    """In a child: this process imports no torch."""
    from workers.checkpoint.tools import run_in_child

    paths = {name: expanded(value) for name, value in arguments.items()}
    told: Data = run_in_child(verb, paths, progress, follow_links=True)
    return told


def _given(**options: Any) -> Data:
    return {name: value for name, value in options.items() if value is not None}

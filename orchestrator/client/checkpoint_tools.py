"""Checkpoint tools for users: on this machine if it can open all locations, else on a node, or between the two."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from cluster.errors import FleetError, SpecError
from cluster.input.checkpoint_location import reference_fields
from orchestrator.client import checkpoint_transfer
from orchestrator.spec.checkpoint_address import (
    are_all_local,
    checkpoint_arguments,
    expand_user,
    is_between_machine_and_pool,
    is_local,
    may_be_job_name,
    resolve_job,
)

if TYPE_CHECKING:
    from orchestrator.client.client import Client

Data = dict[str, Any]
Progress = Callable[[int, int], None]
OpenClient = Callable[..., AbstractContextManager["Client"]]
"""Opens the client when a location is in the fleet. With `start=False` it raises FleetError if no server runs."""


class CheckpointTools:
    """Runs checkpoint tools where their locations are: POOL:PATH, a job, a path of this machine, or a URI."""

    def __init__(self, open_client: OpenClient, progress: Progress):
        self._open_client, self._progress = open_client, progress

    def show(self, ref: str) -> Any:
        ref = self.resolve(ref)
        if is_local(ref):
            return self.run_locally("show", {"path": ref})
        with self._open_client() as client:
            return client.checkpoints.show(ref)

    def plan(self, ref: str, to_kind: str, count: int) -> Any:
        ref = self.resolve(ref)
        if is_local(ref):
            path = self.run_locally("show", {"path": ref})["path"]  # of a folder, the newest in it
            return self.run_locally("plan", {"path": path, "to": to_kind, "count": count})
        with self._open_client() as client:
            return client.checkpoints.plan(ref, to_kind, count=count)

    def copy(self, source: str, target: str, options: Data, key: str = "") -> Data:
        """Copy a checkpoint. Only between pools and stores may `options` have `to_kind`."""
        source = self.resolve(source)
        is_between = is_between_machine_and_pool(source, target)
        if not is_between and not are_all_local(source, target):
            with self._open_client() as client:
                return dict(client.checkpoints.copy(source, target, **options, progress=self._progress, key=key))
        if options.get("to_kind"):
            raise SpecError(
                "to_kind",
                "a copy from or to this machine cannot be converted during the copy",
                "copy it first, then convert the copy with `polyfleet checkpoint convert`",
            )
        if not is_between:
            return {"source": source, **self.run_locally("copy", {"source": source, "target": target})}
        upload, download = checkpoint_transfer.upload_checkpoint, checkpoint_transfer.download_checkpoint
        with self._open_client() as client:
            return (upload if is_local(source) else download)(client, source, target, self._progress)

    def import_(self, source: str, target: str, options: Data, key: str = "") -> Any:
        """Import a file or folder. If only the target is in a pool, the source is sent there."""
        if target and is_local(source) and is_between_machine_and_pool(source, target):
            with self._open_client() as client:
                return checkpoint_transfer.import_local(client, source, target, options, self._progress, key)
        return self.run("import", {"source": source} | ({"root": target} if target else {}), options, key)

    def run(self, tool: str, locations: dict[str, str], options: Data | None = None, key: str = "") -> Any:
        """Run a tool on this machine if it can open all locations, else on a node."""
        locations |= {name: self.resolve(locations[name]) for name in checkpoint_arguments(tool)}
        arguments: Data = {**locations, **(options or {})}
        if are_all_local(*locations.values()):
            return self.run_locally(tool, arguments)
        with self._open_client() as client:
            run = getattr(client.checkpoints, "import_" if tool == "import" else tool)
            return run(**arguments, progress=self._progress, **({"key": key} if key else {}))

    def run_locally(self, tool: str, arguments: Data) -> Any:
        """Run a tool in a child process of this machine, so that this process imports no torch."""
        from workers.checkpoint.tools import run_in_child

        paths = {name: expand_user(value) for name, value in arguments.items()}
        return _with_references(run_in_child(tool, paths, self._progress, follow_links=True))

    def resolve(self, location: str) -> str:
        """POOL:ID for the name or id of a job; any other location unchanged, as all are while no server runs."""
        if not may_be_job_name(location):
            return location
        try:
            client = self._open_client(start=False)
        except FleetError:
            return location
        with client as connected:
            return resolve_job(connected, location)


def _with_references(result: Any) -> Any:
    """The result of a tool that ran on this machine. A checkpoint in it has no pool."""
    if isinstance(result, list):
        return [_with_references(row) for row in result]
    return result | reference_fields("", result["path"]) if "path" in result else result

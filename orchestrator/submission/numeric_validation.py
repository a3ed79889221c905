"""Compare one model numerically on several targets: run a job on each, and find where it differs from the first."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cluster.catalogue import matches_pattern
from cluster.errors import FleetError, SpecError, UserError, nearest
from orchestrator.spec.resource_syntax import accelerators
from orchestrator.submission import divergence, submission

if TYPE_CHECKING:
    from orchestrator.client.client import Client
    from orchestrator.views.fleet import FleetView
    from orchestrator.views.jobs import JobView

Data = dict[str, Any]
Progress = Callable[[str], None]


def run(client: "Client", job: Data, on: list[str], rtol: float, progress: Progress) -> Data:
    """Return {"precision", "targets": [facts without fingerprints], "compared": [{"target", **comparison}], "same"}.

    `on` are pools or kinds; the others are compared with the first. Raises UserError if one has the same kind and torch
    as the first: that would compare a device with itself. An interrupt cancels the jobs.
    """
    if len(on) < 2:
        raise UserError("a comparison needs two targets", "give two, for example --on cpu,tpu:v5e")
    resources = [_resources(client.fleet.show(), target) for target in on]
    views = [submission.submit(client, job | {"resources": resource}) for resource in resources]
    try:
        results = [_result(client.wait(view["id"], on_update=_progress_reporter(progress)), target)
                for view, target in zip(views, on, strict=True)]  # fmt: skip
    except BaseException:
        for view in views:
            client.jobs.cancel(view["id"])
        raise
    _check_different_devices(results, on)
    comparisons = [{"target": target, **divergence.compare(results[0], other, results[0]["precision"], rtol)}
                for target, other in zip(on[1:], results[1:], strict=True)]  # fmt: skip
    heads = [{"target": target, **{k: v for k, v in result.items() if k not in ("layers", "gradients")}}
             for target, result in zip(on, results, strict=True)]  # fmt: skip
    return {
        "precision": results[0]["precision"],
        "targets": heads,
        "compared": comparisons,
        "same": all(divergence.same(result) for result in comparisons),
    }


def _resources(fleet: "FleetView", target: str) -> Data:
    """Resources of a target: a pool if it names one, else a kind."""
    pools = {pool["pool"]: pool for pool in fleet["pools"]}
    if target in pools:
        return {"pool": target}
    kinds = sorted({kind for pool in fleet["pools"] for kind in pool["kinds"]})
    if not any(matches_pattern(pattern, kind) for pattern in _patterns(target) for kind in kinds):
        raise SpecError(
            "on", f"{target!r} is neither a pool nor a kind in this fleet", nearest(target, [*pools, *kinds])
        )
    return {"accelerators": target}


def _patterns(target: str) -> tuple[str, ...]:
    """Patterns of kinds that a target means, () if it is not a kind."""
    try:
        return accelerators(target)[0].kinds
    except UserError:
        return ()


def _result(view: "JobView", target: str) -> Data:
    """Return a job's result. Raises UserError if the model failed, FleetError if the fleet did."""
    if view["state"] != "SUCCEEDED" or not view["result"]:
        failure: Mapping[str, Any] = view["failure"] or {}
        reason = failure.get("message") or view["reason"] or f"it ended as {view['state']}"
        error = UserError if failure.get("kind") == "user" else FleetError
        raise error(f"no result on {target}: {reason}", f"run `polyfleet logs {view['id']}` to see its log")
    result: Data = view["result"]
    return result


def _check_different_devices(results: list[Data], on: list[str]) -> None:
    first = results[0]
    for target, other in zip(on[1:], results[1:], strict=True):
        if (other["kind"], other["torch"]) == (first["kind"], first["torch"]):
            raise UserError(
                f"{on[0]} and {target} are both {first['kind']} with torch {first['torch']}",
                "give another kind, or a pool with another environment: a device always agrees with itself",
            )


def _progress_reporter(progress: Progress) -> "Callable[[JobView], None]":
    return lambda view: progress(f"{view['id']}: {view['state'].lower()}")

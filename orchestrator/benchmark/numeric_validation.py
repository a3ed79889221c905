"""One model on several targets, numerically: a job on each, and where they differ from the first."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cluster.catalogue import matches_pattern
from cluster.errors import FleetError, SpecError, UserError, nearest
from orchestrator import submission
from orchestrator.benchmark import divergence
from orchestrator.resource_syntax import accelerators

if TYPE_CHECKING:
    from orchestrator.client import Client

Data = dict[str, Any]
Progress = Callable[[str], None]


def run(client: "Client", job: Data, on: list[str], rtol: float, progress: Progress) -> Data:
    """{"precision", "targets": [fingerprints' heads], "compared": [{"target", **divergence.compare}], "same"}.

    `on` are pools or kinds; the first is what the others are compared with. Raises UserError where two of them are the
    same device with the same torch: that would compare it with itself. A job that still runs when this is interrupted
    is cancelled.
    """
    if len(on) < 2:
        raise UserError("a comparison needs two targets", "name them: --on cpu,tpu:v5e")
    resources = [_resources(client.fleet(), target) for target in on]
    views = [submission.submit(client, job | {"resources": wanted}) for wanted in resources]
    try:
        told = [_result(client.wait(view["id"], seen=_seen(progress)), target)
                for view, target in zip(views, on, strict=True)]  # fmt: skip
    except BaseException:
        for view in views:
            client.cancel(view["id"])
        raise
    _refuse_the_same(told, on)
    compared = [{"target": target, **divergence.compare(told[0], other, told[0]["precision"], rtol)}
                for target, other in zip(on[1:], told[1:], strict=True)]  # fmt: skip
    heads = [{"target": target, **{k: v for k, v in one.items() if k not in ("layers", "gradients")}}
             for target, one in zip(on, told, strict=True)]  # fmt: skip
    return {
        "precision": told[0]["precision"],
        "targets": heads,
        "compared": compared,
        "same": all(divergence.same(one) for one in compared),
    }


def _resources(fleet: Data, target: str) -> Data:
    """A pool by its name, else a kind."""
    pools = {pool["pool"]: pool for pool in fleet["pools"]}
    if target in pools:
        return {"pool": target}
    kinds = sorted({kind for pool in fleet["pools"] for kind in pool["kinds"]})
    if not any(matches_pattern(pattern, kind) for pattern in _patterns(target) for kind in kinds):
        raise SpecError("on", f"{target!r} is no pool and no kind that is here", nearest(target, [*pools, *kinds]))
    return {"accelerators": target}


def _patterns(target: str) -> tuple[str, ...]:
    """The kinds that a word means, () for one that means none."""
    try:
        return accelerators(target)[0].kinds
    except UserError:
        return ()


def _result(view: Data, target: str) -> Data:
    """Raises UserError where the model itself failed, FleetError where the fleet did."""
    if view["state"] != "SUCCEEDED" or not view["result"]:
        failure = view["failure"] or {}
        why = failure.get("message") or view["reason"] or f"it ended as {view['state']}"
        error = UserError if failure.get("kind") == "user" else FleetError
        raise error(f"no result on {target}: {why}", f"`polyfleet logs {view['id']}` tells more")
    result: Data = view["result"]
    return result


def _refuse_the_same(told: list[Data], on: list[str]) -> None:
    first = told[0]
    for target, other in zip(on[1:], told[1:], strict=True):
        if (other["kind"], other["torch"]) == (first["kind"], first["torch"]):
            raise UserError(
                f"{on[0]} and {target} are both {first['kind']} with torch {first['torch']}",
                "a device agrees with itself: name another kind, or a pool with another environment",
            )


def _seen(progress: Progress) -> Callable[[Data], None]:
    return lambda view: progress(f"{view['id']}: {view['state'].lower()}")

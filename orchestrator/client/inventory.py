"""Summarize the fleet by back end from the facts of its nodes. No input or output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.catalogue import vendor, vendors
from workers.options import device_preference

Data = dict[str, Any]
Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Ranked:
    backend: str
    kind: str
    emulated: bool
    unavailable_reason: str


def state_text(node: Facts) -> str:
    """State of a node with its reason, as in `lost: Ray marked the node dead`."""
    return ": ".join(filter(None, (node["state"], node["reason"])))


def backend_rows(nodes: Sequence[Facts]) -> list[Data]:
    """One row per supported back end, usable ones first: its kinds, pools and devices in the fleet, or the reason why
    there are none. `recommended` is true for the back end of the best device.
    """
    ready = [d for n in nodes if n["state"] == "ready" for d in n["devices"]]
    best = device_preference.best(
        _Ranked(d["backend"], d["kind"], d["emulated"], d["unavailable_reason"]) for d in ready
    )
    rows = [_row(backend, nodes, best is not None and best.backend == backend) for backend in vendors()]
    return sorted(rows, key=lambda row: not row["available"])


def _row(backend: str, nodes: Sequence[Facts], recommended: bool) -> Data:
    facts = vendor(backend)
    own = [(node, device) for node in nodes for device in node["devices"] if device["backend"] == backend]
    usable = [(n, d) for n, d in own if n["state"] == "ready" and not d["unavailable_reason"]]
    serving = [node for node in nodes if node["backend"] == backend]
    return {
        "backend": backend,
        "title": facts.title,
        "aliases": list(facts.aliases),
        "available": bool(usable),
        "recommended": recommended,
        "kinds": sorted({device["kind"] for _, device in usable}),
        "pools": sorted({node["pool"] for node, _ in usable}),
        "torch": sorted({node["versions"].get("torch", "none") for node, _ in usable}),
        "reason": "" if usable else _reason(backend, serving, [device for _, device in own]),
        "devices": [_device(node, device) for node, device in own],
    }


def _device(node: Facts, device: Facts) -> Data:
    lost = "" if node["state"] == "ready" else state_text(node)
    return {
        "device": f"{node['node']}: {device['index']}",
        "name": device["name"],
        "kind": device["kind"],
        "total_bytes": device["total_memory_bytes"],
        "free_bytes": device["free_memory_bytes"],
        "reason": lost or device["unavailable_reason"] or (EMULATED if device["emulated"] else ""),
    }


EMULATED = "emulated: computes on the CPU"


def _reason(backend: str, serving: Sequence[Facts], devices: Sequence[Facts]) -> str:
    lost = [f"node {node['node']}: {state_text(node)}" for node in serving if node["state"] != "ready"]
    unavailable = [f"{d['name']}: {d['unavailable_reason']}" for d in devices if d["unavailable_reason"]]
    if lost or unavailable:
        return "; ".join([*lost, *unavailable])
    if serving:
        return f"no {vendor(backend).title} was detected on {', '.join(node['node'] for node in serving)}"
    return "the fleet has no pool of this back end"

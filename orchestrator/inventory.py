"""The fleet by back end, from what its nodes report. Pure."""

from typing import Any

from cluster.accelerators import TABLE

Data = dict[str, Any]


def backend_rows(nodes: list[Data]) -> list[Data]:
    """One row per back end we know: its kinds and pools here, or the reason why there is none."""
    return [_row(backend, nodes) for backend in TABLE]


def _row(backend: str, nodes: list[Data]) -> Data:
    facts = TABLE[backend]
    own = [(node, device) for node in nodes for device in node["devices"] if device["backend"] == backend]
    usable = [(n, d) for n, d in own if n["state"] == "ready" and not d["unavailable_reason"]]
    serving = [node for node in nodes if node.get("backend") == backend]
    return {
        "backend": backend,
        "title": facts.title,
        "aliases": list(facts.aliases),
        "available": bool(usable),
        "devices": len(usable),
        "kinds": sorted({device["kind"] for _, device in usable}),
        "pools": sorted({node["pool"] for node, _ in usable}),
        "torch": sorted({node["versions"].get("torch", "none") for node, _ in usable}),
        "reason": "" if usable else _reason(backend, serving, [device for _, device in own]),
    }


def _reason(backend: str, serving: list[Data], devices: list[Data]) -> str:
    lost = [f"node {node['node']}: {node['state']}" for node in serving if node["state"] != "ready"]
    unavailable = [f"{d['name']}: {d['unavailable_reason']}" for d in devices if d["unavailable_reason"]]
    if lost or unavailable:
        return "; ".join([*lost, *unavailable])
    if serving:
        return f"no {TABLE[backend].title} was found on {', '.join(node['node'] for node in serving)}"
    return "no pool of this back end in the fleet"

"""Fleet, devices, back ends, findings, environments."""

from typing import Any

from orchestrator.show.table import Renderable, TableStack, TextTable, facts, grid
from orchestrator.show.units import size

Data = dict[str, Any]
ACT_ON = ("error", "warning")
LINES = 3


def pools(fleet: Data) -> TextTable:
    """One line per pool."""
    rows = (
        (
            p["pool"],
            p["backend"],
            ", ".join(p["kinds"]),
            p["environment"],
            p["nodes"],
            p["devices"],
            p["free"],
            p["price_per_hour"] or "",
        )
        for p in fleet["pools"]
    )
    columns = ("POOL", "BACKEND", "KINDS", "ENVIRONMENT", "NODES", "DEVICES", "FREE", "PRICE/H")
    return grid(
        columns,
        rows,
        title=f"fleet {fleet['name']} at {fleet['address']}: {fleet['state']}",
        empty="the fleet has no pools",
    )


def fleet(told: Data) -> TableStack:
    """Pools, who is served first, and what projects hold of their quotas."""
    parts: list[TextTable | str] = [pools(told), "", policy(told["policy"])]
    if told["projects"]:
        parts += ["", projects(told["projects"])]
    return TableStack(tuple(parts))


def policy(told: Data) -> str:
    by_order = told["name"] in ("fifo", "priority")
    parts = [] if by_order else [f"jobs of equal priority may be stopped or moved every {told['every_s']:g} s"]
    if told["ageing_s"]:
        parts += [f"a waiting job gains 1 priority every {told['ageing_s']:g} s"]
    return "; ".join([f"policy {told['name']}", *parts])


def projects(rows: list[Data]) -> TextTable:
    """A line for each kind of each project's quota."""
    lines = (
        (row["project"], row["kind"], _number(row["quota"]), _number(row["held"]), row["borrowed"] or "", _may(row))
        for row in rows
    )
    return grid(("PROJECT", "KIND", "QUOTA", "HELD", "BORROWED", "MAY BORROW"), lines)


def _number(count: int | None) -> str:
    return "" if count is None else str(count)


def _may(row: Data) -> str:
    return "yes" if row["borrow"] else "no"


def hosts(rows: list[Data]) -> TextTable:
    """One line per host of a fleet file: what `polyfleet up` would do there, or why it cannot."""
    lines = (
        (
            row["host"],
            row["address"],
            ", ".join(row["pools"]),
            row["machine"],
            row["python"],
            "✗" if row["problem"] else "✓",
            row["problem"] or "; ".join([*row["steps"], *row["warnings"]]),
        )
        for row in rows
    )
    columns = ("HOST", "ADDRESS", "POOLS", "MACHINE", "PYTHON", "", "PLAN")
    return grid(columns, lines, empty="the fleet file names no hosts: all of it is on this machine")


def host_states(rows: list[Data]) -> TextTable:
    """One line per host of the fleet that is up."""
    lines = (
        (row["host"], row["address"], ", ".join(row["nodes"]), ", ".join(dict.fromkeys(row["nodes"].values())))
        for row in rows
    )
    return grid(("HOST", "ADDRESS", "NODES", "STATE"), lines, empty="no machine has joined this fleet over SSH")


def devices(nodes: list[Data]) -> TextTable:
    """One line per device, and one for each node that has none."""
    rows = [row for node in nodes for row in _device_rows(node)]
    columns = ("POOL", "NODE", "KIND", "DEVICE", "MEMORY", "FREE", "TORCH", "STATE")
    return grid(columns, rows, empty="no nodes; `polyfleet up` brings a fleet up")


def _device_rows(node: Data) -> list[tuple[Any, ...]]:
    torch = node.get("versions", {}).get("torch", "")
    where = (node.get("pool"), node["node"])
    if not node["devices"]:
        return [(*where, "", "no device found" if node["state"] == "ready" else "", "", "", torch, node["state"])]
    return [
        (
            *where,
            device["kind"],
            f"{device['index']}: {device['name']}",
            size(device["total_memory_bytes"]),
            size(device["free_memory_bytes"]),
            torch,
            _device_state(node, device),
        )
        for device in node["devices"]
    ]


def _device_state(node: Data, device: Data) -> str:
    if node["state"] != "ready":
        return str(node["state"])
    if device["unavailable_reason"]:
        return f"unavailable: {device['unavailable_reason']}"
    if device["leased_by"]:
        return f"allocated to {device['leased_by']}"
    return f"ready; {node['note']}" if node.get("note") else "ready"


def backends(rows: list[Data]) -> TextTable:
    """A line per back end with a tick or a cross, and one for each of its devices."""
    lines = [line for row in rows for line in ((_backend_line(row)), *map(_backend_device, row["devices"]))]
    return grid(("", "BACKEND", "DEVICE", "KIND", "NAME", "FREE", "MEMORY", "NOTE"), lines)


def _backend_line(row: Data) -> tuple[Any, ...]:
    note = "recommended" if row["recommended"] else row["reason"]
    return ("✓" if row["available"] else "✗", row["backend"], "", "", row["title"], "", "", note)


def _backend_device(device: Data) -> tuple[Any, ...]:
    sizes = (size(device["free_bytes"]), size(device["total_bytes"]))
    return ("", "", device["device"], device["kind"], device["name"], *sizes, device["reason"])


def libraries(rows: list[Data]) -> TextTable:
    """A line per execution library; ON is empty where a running process has no switch for it."""
    columns = ("", "LIBRARY", "NAME", "FOR", "VERSION", "ON", "SWITCHED", "BUILD", "NOTE")
    return grid(columns, (_library_line(row) for row in rows))


def _library_line(row: Data) -> tuple[Any, ...]:
    mark, state = "✓" if row["available"] else "✗", {True: "yes", False: "no", None: ""}[row["enabled"]]
    made = " ".join(row["flags"])
    return (
        mark,
        row["name"],
        row["display_name"],
        row["devices"],
        row["version"],
        state,
        row["switch"],
        made,
        row["reason"],
    )


def findings(rows: list[Data]) -> TextTable:
    columns = ("LEVEL", "NODE", "SUBJECT", "WHAT", "WHAT TO DO")
    return grid(
        columns,
        ((f["level"], f.get("node"), f["subject"], f["message"], f["remedy"]) for f in rows),
        empty="no findings",
    )


def environments(rows: list[Data]) -> TextTable:
    columns = ("NAME", "STATE", "SIZE", "CURRENT", "PATH")
    return grid(
        columns,
        ((e["name"], e["state"], size(e["size_bytes"]), "yes" if e["current"] else "no", e["path"]) for e in rows),
        empty="no environments; `polyfleet env create NAME` makes one",
    )


def status(data: Data) -> TableStack:
    """Server, fleet, how many jobs are in which state; a line for each of the first things that are wrong."""
    server = {
        name: data["server"][name]
        for name in ("running", "socket", "url", "pid", "version", "started_at", "home")
        if name in data["server"]
    }
    parts: list[Renderable | str] = [facts({"server": "running" if server.pop("running") else "not running"} | server)]
    if data["fleet"]:
        parts += ["", fleet(data["fleet"])]
    else:
        parts += ["", data["fleet_note"]]
    if data["jobs"]:
        parts += ["", "jobs: " + ", ".join(f"{count} {state}" for state, count in data["jobs"].items())]
    if wrong := [f for f in (data.get("health") or {}).get("findings", []) if f["level"] in ACT_ON]:
        parts += ["", *(f"{f['subject']}: {f['message']}" for f in wrong[:LINES])]
        if len(wrong) > LINES:
            parts += [f"and {len(wrong) - LINES} more: `polyfleet doctor`"]
    return TableStack(tuple(parts))

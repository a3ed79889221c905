"""Fleet, devices, backends, findings, environments."""

from typing import Any

from orchestrator.client.inventory import state_text
from orchestrator.show.table import Renderable, TableStack, TextTable, facts, grid
from orchestrator.units import size

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


def fleet(data: Data) -> TableStack:
    """Pools, scheduling policy, and projects with the use of their quotas."""
    parts: list[TextTable | str] = [pools(data), "", policy(data["policy"])]
    if data["projects"]:
        parts += ["", projects(data["projects"])]
    return TableStack(tuple(parts))


def policy(data: Data) -> str:
    by_order = data["name"] in ("fifo", "priority")
    parts = [] if by_order else [f"jobs of equal priority may be stopped or moved every {data['every_s']:g} s"]
    if data["ageing_s"]:
        parts += [f"a waiting job gains 1 priority every {data['ageing_s']:g} s"]
    return "; ".join([f"policy {data['name']}", *parts])


def projects(rows: list[Data]) -> TextTable:
    """One line per project and kind of its quota."""
    lines = (
        (
            row["project"],
            row["kind"],
            _number(row["quota"]),
            _number(row["held"]),
            row["borrowed"] or "",
            _borrow_text(row),
        )
        for row in rows
    )
    return grid(("PROJECT", "KIND", "QUOTA", "HELD", "BORROWED", "MAY BORROW"), lines)


def _number(count: int | None) -> str:
    return "" if count is None else str(count)


def _borrow_text(row: Data) -> str:
    return "yes" if row["borrow"] else "no"


def hosts(rows: list[Data]) -> TextTable:
    """One line per host of a fleet file: what `polyfleet up` would do there, or the problem that prevents it."""
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
    return grid(columns, lines, empty="the fleet file names no hosts: all pools are on this machine")


def host_states(rows: list[Data]) -> TextTable:
    """One line per host of the running fleet."""
    lines = (
        (row["host"], row["address"], ", ".join(row["nodes"]), ", ".join(dict.fromkeys(row["nodes"].values())))
        for row in rows
    )
    return grid(("HOST", "ADDRESS", "NODES", "STATE"), lines, empty="no machine has joined this fleet over SSH")


def node_state(view: Data) -> TableStack:
    """Result of a drain, a resume or a removal of a node: one line."""
    return TableStack((f"{view['node']}: {state_text(view)}",))


def devices(nodes: list[Data]) -> TextTable:
    """One line per device, and one per node without devices."""
    rows = [row for node in nodes for row in _device_rows(node)]
    columns = ("POOL", "NODE", "KIND", "DEVICE", "MEMORY", "FREE", "TORCH", "STATE")
    return grid(columns, rows, empty="no nodes; run `polyfleet up` to start a fleet")


def _device_rows(node: Data) -> list[tuple[Any, ...]]:
    torch = node["versions"].get("torch", "")
    location = (node["pool"], node["node"])
    if not node["devices"]:
        return [(*location, "", "no devices" if node["state"] == "ready" else "", "", "", torch, state_text(node))]
    return [
        (
            *location,
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
        return state_text(node)
    if device["unavailable_reason"]:
        return f"unavailable: {device['unavailable_reason']}"
    if device["allocated_to"]:
        return f"allocated to {device['allocated_to']}"
    return f"ready; {node['note']}" if node["note"] else "ready"


def backends(rows: list[Data]) -> TextTable:
    """One line per backend with a tick or a cross, and one per device."""
    lines = [line for row in rows for line in ((_backend_line(row)), *map(_backend_device, row["devices"]))]
    return grid(("", "BACKEND", "DEVICE", "KIND", "NAME", "FREE", "MEMORY", "NOTE"), lines)


def _backend_line(row: Data) -> tuple[Any, ...]:
    note = "recommended" if row["recommended"] else row["reason"]
    return ("✓" if row["available"] else "✗", row["backend"], "", "", row["title"], "", "", note)


def _backend_device(device: Data) -> tuple[Any, ...]:
    sizes = (size(device["free_bytes"]), size(device["total_bytes"]))
    return ("", "", device["device"], device["kind"], device["name"], *sizes, device["reason"])


def libraries(rows: list[Data]) -> TextTable:
    """One line per execution library; ON is empty if a running process cannot switch it."""
    columns = ("", "LIBRARY", "NAME", "FOR", "VERSION", "ON", "SWITCHED", "BUILD", "NOTE")
    return grid(columns, (_library_line(row) for row in rows))


def _library_line(row: Data) -> tuple[Any, ...]:
    mark, state = "✓" if row["available"] else "✗", {True: "yes", False: "no", None: ""}[row["enabled"]]
    build_flags = " ".join(row["flags"])
    return (
        mark,
        row["name"],
        row["display_name"],
        row["devices"],
        row["version"],
        state,
        row["switch"],
        build_flags,
        row["reason"],
    )


def findings(rows: list[Data]) -> TextTable:
    columns = ("LEVEL", "NODE", "SUBJECT", "WHAT", "NEXT STEP")
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
        empty="no environments; run `polyfleet env create NAME` to create one",
    )


def status(data: Data) -> TableStack:
    """Server, fleet, number of jobs by state, and the first errors and warnings."""
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
    if problems := [f for f in (data.get("health") or {}).get("findings", []) if f["level"] in ACT_ON]:
        parts += ["", *(f"{f['subject']}: {f['message']}" for f in problems[:LINES])]
        if len(problems) > LINES:
            parts += [f"and {len(problems) - LINES} more; run `polyfleet doctor` to see them"]
    return TableStack(tuple(parts))

"""Checkpoints and what happens to them on the way to another pool."""

from typing import Any

from orchestrator.show.grid import Grid, Stack, facts, grid
from orchestrator.show.text import visible
from orchestrator.show.units import duration, size

Data = dict[str, Any]


def checkpoints(rows: list[Data]) -> Grid:
    """One line per checkpoint; what is wrong with one only where something is."""
    columns = ("CHECKPOINT", "STEP", "SIZE", "KIND", "SAVED", "PROBLEM")
    damaged = any(c.get("problem") for c in rows)
    return grid(
        columns if damaged else columns[:-1],
        (_listed(c) if damaged else _listed(c)[:-1] for c in rows),
        empty="no checkpoints",
    )


def _listed(c: Data) -> tuple[Any, ...]:
    problem = c.get("problem", "")
    saved_bytes = "" if problem else size(c["bytes"])
    return (f"{c['pool']}:{c['path']}", c["step"], saved_bytes, c["producer"]["kind"], c["created"], problem)


def report(data: Data) -> Stack:
    """Of a copy, a verification, a plan or the checkpoint itself: each is told by what only it has."""
    if "plan" in data:
        return _copied(data)
    if "chunks" in data:
        return _verified(data)
    return _planned(data) if "target" in data else _shown(data)


def _shown(data: Data) -> Stack:
    producer = {name: value for name, value in data["producer"].items() if value not in (None, "")}
    head = {
        "checkpoint": f"{data['pool']}:{data['path']}",
        "step": data["step"],
        "saved": data["created"],
        "size": size(data["bytes"]),
        "files": data["files"],
        "parameters": f"{data['parameters']:,}",
        "holds": ", ".join(_entry(name, entry) for name, entry in data["entries"].items()),
        "tensors": ", ".join(f"{count} {role}" for role, count in data["roles"].items()),
        "tied": ", ".join(f"{name} to {other}" for name, other in data["ties"].items()),
        "by": ", ".join(f"{name} {value}" for name, value in producer.items()),
    }
    rows = ((dtype, held["tensors"], size(held["bytes"])) for dtype, held in data["dtypes"].items())
    return Stack((facts(head), "", grid(("DTYPE", "TENSORS", "BYTES"), rows, empty="no tensors")))


def _entry(name: str, entry: Data) -> str:
    words = " ".join(filter(None, (entry["kind"], entry["type"])))
    return name if words in ("", name) else f"{name} ({words})"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _verified(data: Data) -> Stack:
    head = {
        "checkpoint": f"{data['pool']}:{data['path']}",
        "step": data["step"],
        "sound": data["ok"],
        "read": f"{size(data['bytes'])} in {_counted(data['chunks'], 'chunk')}",
    }
    return Stack((facts(head), *(visible(problem) for problem in data["problems"])))


def _planned(data: Data) -> Stack:
    head = {
        "step": data["step"],
        "size": size(data["bytes"]),
        "saved on": data["source"]["kind"] or data["source"]["backend"],
        "moves to": f"{data['target']['count']} × {data['target']['kind']}",
        "can move": data["ok"],
    }
    return Stack((facts(head), *_what_follows(data)))


def _copied(data: Data) -> Stack:
    head = {
        "source": data["source"],
        "target": data["target"],
        "step": data["step"],
        "copied": "nothing, it was there already"
        if data["already_there"]
        else f"{size(data['bytes'])} in {_counted(data['files'], 'file')}, {duration(data['seconds'])}",
        "verified": data["verified"],
        "for kind": data["to_kind"],
    }
    return Stack((facts(head), *_what_follows(data["plan"])))


def _what_follows(plan: Data) -> tuple[Grid | str, ...]:
    """Its dtypes on the target, then the random streams that cannot go on there."""
    columns = ("DTYPE", "TENSORS", "BYTES", "ACTION", "TO", "MAY LOSE", "REASON")
    rows = (
        (d["dtype"], d["tensors"], size(d["bytes"]), d["action"], d["to"], d["may_lose"], d["reason"])
        for d in plan["dtypes"]
    )
    broken = [f"random numbers of {name}: {fate}" for name, fate in plan["random"].items() if fate != "continued"]
    return ("", grid(columns, rows, empty="no tensors"), *(["", *map(visible, broken)] if broken else []))

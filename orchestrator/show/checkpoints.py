"""Checkpoints: lists, details, and results of verifying, planning, copying, converting, importing and exporting."""

from typing import Any

from orchestrator.show.table import TableStack, TextTable, facts, grid
from orchestrator.terminal_text import escape_control
from orchestrator.units import duration, size

Data = dict[str, Any]


def checkpoints(rows: list[Data], below: str = "") -> TextTable:
    """One line per checkpoint, with a column PROBLEM only if one has a problem. `below` is the folder searched."""
    columns = ["CHECKPOINT", "STEP", "SIZE", "KIND", "SAVED"]
    cells = [_row(c) for c in rows]
    if any(c.get("nodes") for c in rows):
        columns.append("ON")
        cells = [(*cell, ", ".join(c.get("nodes", ()))) for cell, c in zip(cells, rows, strict=True)]
    if any(c.get("problem") for c in rows):
        columns.append("PROBLEM")
        cells = [(*cell, c.get("problem", "")) for cell, c in zip(cells, rows, strict=True)]
    return grid(tuple(columns), cells, empty=f"no checkpoints below {below}" if below else "no checkpoints")


def _row(c: Data) -> tuple[Any, ...]:
    problem = c.get("problem", "")
    saved_bytes = "" if problem else size(c["bytes"])
    return (c["ref"], c["step"], saved_bytes, c["producer"]["kind"], c["created"])


def describe_table(data: Data) -> TableStack:
    producer = {name: value for name, value in data["producer"].items() if value not in (None, "")}
    head = {
        "checkpoint": data["ref"],
        "step": data["step"],
        "saved": data["created"],
        "size": size(data["bytes"]),
        "files": data["files"],
        "parameters": f"{data['parameters']:,}",
        "contains": ", ".join(_entry(name, entry) for name, entry in data["entries"].items()),
        "tensors": ", ".join(f"{count} {role}" for role, count in data["roles"].items()),
        "tied": ", ".join(f"{name} to {other}" for name, other in data["ties"].items()),
        "saved by": ", ".join(f"{name} {value}" for name, value in producer.items()),
        "damaged": escape_control(data.get("damaged", "")),
    }
    skipped = [f"{checkpoint['path']} is skipped: {checkpoint['reason']}" for checkpoint in data.get("passed_over", ())]
    rows = ((dtype, totals["tensors"], size(totals["bytes"])) for dtype, totals in data["dtypes"].items())
    table = grid(("DTYPE", "TENSORS", "BYTES"), rows, empty="no tensors")
    return TableStack((facts(head), "", table, *(["", *map(escape_control, skipped)] if skipped else [])))


def _entry(name: str, entry: Data) -> str:
    description = " ".join(filter(None, (entry["kind"], entry["type"])))
    return name if description in ("", name) else f"{name} ({description})"


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def verified(data: Data) -> TableStack:
    head = {
        "checkpoint": data["ref"],
        "step": data["step"],
        "sound": data["ok"],
        "read": f"{size(data['bytes'])} in {_plural(data['chunks'], 'chunk')}",
    }
    return TableStack((facts(head), *(escape_control(problem) for problem in data["problems"])))


def planned(data: Data) -> TableStack:
    memory, reshard = data["memory"], data["reshard"]
    head = {
        "step": data["step"],
        "size": size(data["bytes"]),
        "saved on": data["source"]["kind"] or data["source"]["backend"],
        "moves to": f"{data['target']['count']} × {data['target']['kind']}",
        "memory": _memory(memory),
        "shards": f"{_plural(reshard['from'], 'rank')} to {reshard['to']}; {reshard['tensors_cut']} tensors are cut",
        "can move": data["ok"],
    }
    columns = ("DTYPE", "TENSORS", "BYTES", "ACTION", "TO", "MAY LOSE", "REASON")
    rows = (
        (d["dtype"], d["tensors"], size(d["bytes"]), d["action"], d["to"], d["may_lose"], d["reason"])
        for d in data["dtypes"]
    )
    sentences = [escape_control(sentence) for sentence in data["cannot_follow"]]
    return TableStack(
        (facts(head), "", grid(columns, rows, empty="no tensors"), *(["", *sentences] if sentences else []))
    )


def _memory(memory: Data) -> str:
    needed = size(memory["needed_bytes"])
    if memory["device_bytes"] is None:
        return f"{needed} needed; the memory of these devices is unknown"
    fit_texts = {"replicated": "fits on each device", "sharded": "fits when sharded", "no": "does not fit"}
    return f"{needed} needed, {size(memory['device_bytes'])} per device: {fit_texts[memory['fits']]}"


def copied(data: Data) -> TableStack:
    head = {
        "source": data["source"],
        "target": data["target"],
        "step": data["step"],
        "copied": "nothing: the target already has it"
        if data["already_there"]
        else f"{size(data['transferred_bytes'])} of {size(data['bytes'])} transferred, {duration(data['seconds'])}",
        "verified": data["verified"],
    }
    return TableStack((facts(head), *(("", conversion(data["conversion"])) if "conversion" in data else ())))


def conversion(data: Data) -> TableStack:
    """Converted tensors, with the differences in their values."""
    head = {
        "checkpoint": data["ref"],
        "step": data["step"],
        "size": size(data["bytes"]),
        "unchanged": f"{data['kept']} tensors",
        "converted": f"{len(data['converted'])} tensors, {data['lossy']} with changed values",
    }
    columns = ("TENSOR", "FROM", "TO", "CHANGED", "MAX ABS", "MAX REL", "NEW INF", "NEW NAN")
    rows = (
        (name, t["stored_dtype"], t["dtype"], c["values_changed"], f"{c['max_abs_error']:.3g}",
         f"{c['max_rel_error']:.3g}", c["new_inf"], c["new_nan"])
        for name, t in data["converted"].items()
        for c in (t["change"],)
    )  # fmt: skip
    notes = [escape_control(note) for note in data["notes"]]
    return TableStack((facts(head), "", grid(columns, rows, empty="nothing had to be converted"), *notes))


def differences(data: Data) -> TableStack:
    head = {"a": data["a"], "b": data["b"], "same": data["same"], "equal": f"{data['equal']} tensors, bit for bit"}
    columns = ("TENSOR", "DTYPE", "SHAPE", "CHANGED", "MAX ABS", "MAX REL", "ULP")
    rows = (
        (t["name"], _sides(t, "dtype"), _sides(t, "shape"), t.get("changed", ""), *_errors(t)) for t in data["tensors"]
    )
    other = [
        *(f"names differ: {escape_control(sentence)}" for sentence in data.get("names", ())),
        *(f"only in a: {escape_control(name)}" for name in data["only_in_a"]),
        *(f"only in b: {escape_control(name)}" for name in data["only_in_b"]),
        *(f"values differ: {escape_control(name)}" for name in data["entries"]),
    ]
    return TableStack((facts(head), "", grid(columns, rows, empty="no tensor differs"), *other))


def _sides(row: Data, what: str) -> str:
    return f"{row[what]} / {row[f'{what}_b']}" if row.get(f"{what}_b", row[what]) != row[what] else str(row[what])


def _errors(row: Data) -> tuple[Any, ...]:
    if "max_abs" not in row:
        return ("", "", "")
    return (f"{row['max_abs']:.3g}", f"{row['max_rel']:.3g}", row["max_ulp"])


def pruned(data: Data) -> TableStack:
    verb = "would be deleted" if data["dry_run"] else "deleted"
    head = {"folder": data["root"], "kept": len(data["kept"]), verb: len(data["deleted"]), "freed": size(data["bytes"])}
    return TableStack((facts(head), *(f"{verb}: {escape_control(name)}" for name in data["deleted"])))


def imported(data: Data) -> TableStack:
    head = {
        "checkpoint": data["ref"],
        "from": data["format"],
        "step": data["step"],
        "size": f"{size(data['bytes'])}, {size(data['copied_bytes'])} of it copied",
        "contains": ", ".join(f"{name} ({kind})" for name, kind in data["entries"].items()),
        "tensors": data["tensors"],
    }
    return TableStack((facts(head), *map(escape_control, data["notes"])))


def exported(data: Data) -> TableStack:
    head = {
        "written": data["ref"],
        "as": data["format"],
        "tensors": data["tensors"],
        "files": ", ".join(data["files"]),
    }
    return TableStack((facts(head), *map(escape_control, data["notes"])))


def pinned(data: Data) -> TextTable:
    return facts({"checkpoint": data["ref"], "pinned": data["pinned"]})

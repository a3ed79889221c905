"""Jobs: lists, details, history, placement explanations, offers and files."""

import json
from collections.abc import Mapping
from typing import Any

from orchestrator.core.attempt.story import step_text
from orchestrator.core.states import TERMINAL
from orchestrator.show import benchmark
from orchestrator.show.table import TableStack, TextTable, facts, grid
from orchestrator.terminal_text import escape_control, one_line
from orchestrator.units import elapsed, size, time_since, timestamp, when

Data = dict[str, Any]
COLUMNS = ("id", "task", "state", "kind", "pool", "submitted_at", "started_at", "ended_at", "known_until", "attempts",
           "reason")  # fmt: skip
"""Fields of a job that a line of the list needs."""
NO_JOBS = "no jobs; run `polyfleet submit FILE.yaml` to submit one"


def jobs(rows: list[Data], chosen: str = "") -> TextTable:
    """One line per job. `chosen` has the options of the query, as the user typed them."""
    columns = ("JOB", "TASK", "STATE", "KIND", "POOL", "SUBMITTED", "RAN", "WHY")
    return grid(
        columns,
        (
            (
                j["id"],
                j["task"],
                j["state"],
                j["kind"],
                j["pool"],
                time_since(j["submitted_at"]),
                run_time(j),
                _reason(j),
            )
            for j in rows
        ),
        empty=f"no job matches {chosen}; run `polyfleet jobs --all` to list every job" if chosen else NO_JOBS,
    )


def run_time(view: Data) -> str:
    """Time that a job or an attempt ran, up to its last confirmed state; "" if nothing was confirmed after its start.

    If it ended before the server saw it running, the time counts from its placement.
    """
    placed = [view.get("placed_at"), *(attempt["placed_at"] for attempt in view.get("attempts", []))]
    first = view["started_at"] or (next(filter(None, placed), None) if view["ended_at"] else None)
    last_contact = view.get("known_until")
    return "" if last_contact == first and not view["ended_at"] else elapsed(first, view["ended_at"] or last_contact)


def _reason(job: Data) -> str:
    return "" if job["state"] == "SUCCEEDED" else str(job["reason"] or "")


def job(view: Data) -> TableStack:
    """All details of one job."""
    parts: list[TextTable | TableStack | str] = [facts(_head(view))]
    if view["failure"]:
        parts += ["", *failure(view["failure"])]
    if view["metrics"]:
        parts += ["", facts({"last report": view["metrics"]})]
    if view["result"]:
        parts += ["", "result", result(view["task"], view["result"])]
    if view["attempts"]:
        parts += ["", attempts(view)]
    return TableStack(tuple(parts))


def result(task: str, returned: Data) -> TextTable | TableStack:
    """Result of a task: one line per value, nested values as JSON."""
    if task == "benchmark" and "host" in returned:
        return benchmark.measured(returned)
    lines = ((name, _flat(value)) for name, value in returned.items())
    return grid(("", ""), lines, empty="the task returned nothing")


def _flat(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, dict | list) else str(value)


def reports(rows: list[Data]) -> TextTable:
    """One line per report of a job, one column per metric."""
    names = dict.fromkeys(name for row in rows for name in row["metrics"])
    lines = (
        (r["attempt"], _step(r), when(r["reported_at"]), *(r["metrics"].get(name) for name in names)) for r in rows
    )
    return grid(("ATTEMPT", "STEP", "TIME", *names), lines, empty="the job reported nothing with ctx.report")


def _step(row: Data) -> str:
    return str(row["step"]) if row["of"] is None else f"{row['step']} of {row['of']}"


def history(rows: list[Data]) -> TextTable:
    """One line per event of a job."""
    lines = ((when(row["occurred_at"]), row["attempt"] or "", row["event"], _event(row["data"])) for row in rows)
    return grid(("TIME", "ATTEMPT", "EVENT", "WHAT"), lines, empty="no events")


def story(view: Data) -> TableStack:
    """The events of a job, then one line per message from which something followed for it. Times are UTC."""
    steps = (step_text(s["number"], _wall_s(s["handled_at"]), s["message"], s["changes"]) for s in view["steps"])
    return TableStack((history(view["events"]), "", *map(one_line, steps)))


def _wall_s(iso: str) -> float:
    moment = timestamp(iso)
    return moment.timestamp() if moment else 0.0


def _event(data: Data) -> str:
    """Reason of an event, else its scalar values. Nested values are only in the JSON output."""
    if reason := data.get("reason"):
        return str(reason)
    single = {name: value for name, value in data.items() if isinstance(value, str | int | float) and value != ""}
    return ", ".join(f"{name} {value}" for name, value in single.items())


def _head(view: Data) -> Data:
    point = view["checkpoint"]
    keys = ("id", "name", "task", "state", "reason", "kind", "pool", "nodes")
    return {key: view[key] for key in keys if view.get(key) not in (None, "")} | {
        "attempt": view["attempt"] or None,
        "priority": view["priority"],
        "submitted": view["submitted_at"],
        "started": view["started_at"],
        "ended": view["ended_at"],
        "ran": run_time(view),
        "progress": _progress(view.get("progress")),
        "peak memory": _peak(view),
        "restarts": view["restarts"] or None,
        "interruptions": view["interruptions"] or None,
        "resumed": _resumed(view),
        "missed": view["missed_checkpoint"] or None,
        "resumed from": view["script_checkpoint"] or None,
        "if moved": view["continues"] or None,
        "missed files": view["missed_files"] or None,
        "checkpoint": f"{point['pool']}:{point['path']} (step {point['step']})" if point else None,
        "copies": ", ".join(f"step {r['step']} on {r['node']} ({r['pool']}:{r['path']})" for r in view["replicas"])
        or None,
        "not copied": view["unreplicated"] or None,
    }


def _resumed(view: Data) -> str | None:
    """How the newest started attempt resumed; None for a first attempt."""
    if view["resumed_step"] is not None:
        source = f" from {view['resumed_from']}" if view["resumed_from"] else ""
        return f"at step {view['resumed_step']}{source}"
    is_restart = len(view["attempts"]) > 1 and view["attempts"][-1]["started_at"]
    return "no: it started again without a checkpoint" if is_restart and not view["script_checkpoint"] else None


def _progress(progress: Data | None) -> str | None:
    """`step 400 of 1000 (40 %), about 3 min left at 3.1 steps/s (reported)`; None without any progress data."""
    if not progress or not (progress["step"] or progress["left_from"] != "attained"):
        return None
    of = f" of {progress['of']} ({100 * progress['step'] / progress['of']:.0f} %)" if progress["of"] else ""
    time_left = progress["left"] if progress["left_from"] != "attained" else "time left unknown"
    return f"step {progress['step']}{of}, {time_left}"


def _peak(view: Data) -> str | None:
    """Peak memory of the newest attempt that has a measurement."""
    peaks = [bytes_ for a in view["attempts"] if (bytes_ := a.get("peak_memory_bytes"))]
    return size(peaks[-1]) if peaks else None


def failure(data: Mapping[str, Any]) -> list[TextTable | str]:
    """Rank, node and message of a failure, then the traceback of the user's own frames."""
    code = "" if data.get("exit_code") is None else f", exit code {data['exit_code']}"
    summary = escape_control(f"rank {data['rank']} on node {data['node']} ({data['kind']}{code}): {data['message']}")
    return [summary, escape_control(data["traceback"]).rstrip()] if data.get("traceback") else [summary]


def attempts(view: Data) -> TextTable:
    """One line per attempt of a job."""
    columns = ("ATTEMPT", "CANDIDATE", "KIND", "POOL", "PLACED", "RAN", "ENDED AS", "WHY")
    return grid(
        columns,
        (
            (
                a["attempt"],
                a["candidate"],
                a["kind"],
                a["pool"],
                a["placed_at"],
                run_time(a | {"known_until": view.get("known_until")}),
                ended_as(a, view),
                a["reason"],
            )
            for a in view["attempts"]
        ),
    )


def ended_as(attempt: Data, view: Data) -> str:
    """Outcome of an attempt: `interrupted` if a rank failed, but not because of the job's code.

    The job continues after an interruption. An attempt whose reason is a restart stays `failed`.
    """
    is_last = attempt["attempt"] == view["attempts"][-1]["attempt"]
    failed_job = is_last and view["state"] == "FAILED" and view["reason"] == attempt["reason"]
    at_fault = failed_job or attempt["reason"].startswith("restart ")
    return "interrupted" if attempt["outcome"] == "failed" and not at_fault else str(attempt["outcome"])


def plan(explanation: Data) -> TableStack:
    """Per candidate and devices: fits, or the reason why not; then what would start."""
    rows = [
        row for candidate in explanation["candidates"] for row in _candidate_rows(candidate, explanation.get("runs"))
    ]
    table = grid(("CANDIDATE", "WANTS", "WHERE", "ANSWER"), rows, empty="no candidates")
    start_line = _would_start(explanation)
    return TableStack(
        (
            *_state_lines(explanation),
            table,
            *(["", escape_control(start_line)] if start_line else []),
            *_late(explanation),
            *_policy(explanation),
            *_for_others(explanation),
        )
    )


def _late(explanation: Data) -> list[str]:
    return [escape_control(sentence)] if (sentence := explanation.get("late")) else []


def _policy(explanation: Data) -> list[str]:
    """The policy that orders this job among others of its priority; none for a job that has ended."""
    name, fault = explanation.get("policy"), explanation.get("policy_fault")
    if not name or explanation.get("state") in TERMINAL:
        return []
    if fault:
        return [escape_control(f"jobs of equal priority are served in the order of submission, because {fault}")]
    return [escape_control(f"policy {name} orders jobs of equal priority")]


def _for_others(explanation: Data) -> list[str]:
    """For a hypothetical fleet: its changes, and the other jobs that would start earlier or later."""
    changes = explanation.get("if")
    if not changes:
        return []
    lines = [f"{other['job']} {other['then']}" for other in changes["others"]]
    escaped_lines = [escape_control(line) for line in lines] or ["nothing would change for other jobs"]
    return ["", escape_control(f"if {' and '.join(changes['changes'])}:"), *escaped_lines]


def _state_lines(explanation: Data) -> list[str]:
    """State of a job; a specification that was not submitted has none."""
    state = explanation.get("state")
    if not state:
        return []
    state_line = escape_control(f"{state}: {explanation['reason']}" if explanation["reason"] else state)
    missing = [
        f"it resumed without part of its state: {escape_control(reason)}" for reason in explanation.get("missed", ())
    ]
    return [state_line, *missing, *(["it has ended; if it were submitted now:"] if state in TERMINAL else [])]


def _candidate_rows(candidate: Data, runs: Data | None) -> list[tuple[Any, ...]]:
    nodes = f" on each of {candidate['nodes']} nodes" if candidate["nodes"] > 1 else ""
    count = "all" if candidate.get("exclusive") else candidate["count"]
    requested = f"{count} × {' or '.join(candidate['kinds'])}{nodes}"
    number = candidate["candidate"]
    speed = candidate.get("speed") or {}
    held = runs["allocations"] if runs and runs["candidate"] == candidate["candidate"] else ()
    running_on = {allocation["devices"] for allocation in held}
    fits = [(number, requested, devices, ": ".join(filter(None, ("runs here" if devices in running_on else "fits",
             speed.get(devices))))) for devices in candidate["fits"]]  # fmt: skip
    refused = [(number, requested, devices or "all", sentence) for devices, sentence in candidate["refused"].items()]
    return [*fits, *refused] or [(number, requested, "", "no node has such a device")]


def _would_start(explanation: Data) -> str:
    if runs := explanation.get("runs"):
        return f"runs as {_placed(runs)}"
    start = explanation["would_start"]
    if explanation.get("state") in TERMINAL:
        return ""
    if explanation.get("impossible"):
        return f"can never start: {explanation['impossible']}"
    if start is None:
        preempt = explanation.get("preempt")
        return (
            f"would wait until {', '.join(preempt)} have saved and stopped"
            if preempt
            else "would wait: nothing fits now"
        )
    return f"would start as {_placed(start)}"


def _placed(start: Data) -> str:
    allocations = ", ".join(f"{a['devices']} [{', '.join(map(str, a['numbers']))}]" for a in start["allocations"])
    reason = f": {start['reason']}" if start.get("reason") else ""
    return f"candidate {start['candidate']} on {allocations}{reason}"


def offers(explanation: Data) -> TableStack:
    """One line per offer, best first. Offers that a candidate did not request appear only if it has no other."""
    resource_columns, price_columns = (
        ("CHOSEN", "CANDIDATE", "POOL", "RESOURCES"),
        ("SPEED", "PRICE/H", "PRICE/M ITEMS"),
    )
    requested = {offer["candidate"] for offer in explanation["offers"] if offer["when"] != "not_asked_for"}
    visible = [o for o in explanation["offers"] if o["when"] != "not_asked_for" or o["candidate"] not in requested]
    never = explanation["impossible"]
    table = grid(
        (*resource_columns, "WAIT", *price_columns, "WHY"), map(_offer_row, visible), empty=f"nothing to offer: {never}"
    )
    return TableStack((table, *(["", escape_control(f"can never start: {never}")] if never and visible else [])))


def _offer_row(offer: Data) -> tuple[Any, ...]:
    minimum, maximum = offer["min_count"], offer["count"]
    number = f"{maximum}" if minimum == maximum else f"{minimum} to {maximum}"
    nodes = f" on each of {offer['nodes']} nodes" if offer["nodes"] > 1 else ""
    return (
        "✓" if offer["chosen"] else "",
        offer["candidate"],
        offer["pool"],
        f"{number} × {offer['kind']}{nodes}",
        offer["wait"],
        offer["speed"],
        offer["price_per_hour"],
        offer["price_per_million_items"],
        offer["reason"],
    )


def files(data: Data) -> TableStack:
    return TableStack((_file_rows(data["entries"]), *map(escape_control, data["notes"])))


def _file_rows(entries: list[Data]) -> TextTable:
    rows = ((_file_name(entry), _file_size(entry), when(entry["modified_at"])) for entry in entries)
    return grid(("FILE", "SIZE", "CHANGED"), rows, empty="no files")


def _file_name(entry: Data) -> str:
    if entry["type"] == "link":
        return f"{entry['path']} -> {entry['target']}"
    return f"{entry['path']}/" if entry["type"] == "folder" else str(entry["path"])


def _file_size(entry: Data) -> str:
    return size(entry["bytes"]) if entry["type"] == "file" else ""


def transferred(data: Data) -> TableStack:
    count = len(data["files"])
    head = {
        "job": data["job"],
        "to": data["target"],
        "files": f"{count} of {size(data['bytes'])}, {size(data['transferred_bytes'])} transferred",
    }
    return TableStack((facts(head), *map(escape_control, data["notes"])))

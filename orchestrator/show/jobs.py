"""Jobs, one job, and why it runs where it does or nowhere."""

import json
from typing import Any

from orchestrator.core.states import TERMINAL
from orchestrator.show import benchmark
from orchestrator.show.table import TableStack, TextTable, facts, grid
from orchestrator.show.terminal_text import escape_control
from orchestrator.show.units import elapsed, size, time_since, when

Data = dict[str, Any]
COLUMNS = ("id", "task", "state", "kind", "pool", "submitted_at", "started_at", "ended_at", "known_until", "attempts",
           "reason")  # fmt: skip
"""The fields of a job that a line of the list is made of."""
NO_JOBS = "no jobs; `polyfleet submit FILE.yaml` submits one"


def jobs(rows: list[Data], chosen: str = "") -> TextTable:
    """One line per job. `chosen` are the options that chose them, as they were typed."""
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
                ran(j),
                _why(j),
            )
            for j in rows
        ),
        empty=f"no job matches {chosen}; `polyfleet jobs --all` lists every job" if chosen else NO_JOBS,
    )


def ran(view: Data) -> str:
    """How long a job or an attempt ran, as far as that is known. One that ended before it was seen running counts from
    its placement.
    """
    placed = [view.get("placed_at"), *(attempt["placed_at"] for attempt in view.get("attempts", []))]
    first = view["started_at"] or (next(filter(None, placed), None) if view["ended_at"] else None)
    return elapsed(first, view["ended_at"] or view.get("known_until"))


def _why(job: Data) -> str:
    return "" if job["state"] == "SUCCEEDED" else str(job["reason"] or "")


def job(view: Data) -> TableStack:
    """All that is known of one job."""
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
    """What a task returned: a line for each of its values, of several parts as JSON."""
    if task == "benchmark" and "host" in returned:
        return benchmark.measured(returned)
    lines = ((name, _flat(value)) for name, value in returned.items())
    return grid(("", ""), lines, empty="its task returned nothing")


def _flat(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, dict | list) else str(value)


def reports(rows: list[Data]) -> TextTable:
    """A line for each report of a job, a column for each of its metrics."""
    metrics = dict.fromkeys(name for row in rows for name in row if name not in ("seq", "epoch", "step", "time"))
    lines = ((row["epoch"], row.get("step"), when(row["time"]), *(row.get(name) for name in metrics)) for row in rows)
    return grid(("ATTEMPT", "STEP", "TIME", *metrics), lines, empty="nothing was reported with ctx.report")


def history(rows: list[Data]) -> TextTable:
    """A line for each event of a job."""
    lines = ((when(row["time"]), row["epoch"] or "", row["event"], _event(row["data"])) for row in rows)
    return grid(("TIME", "ATTEMPT", "EVENT", "WHAT"), lines, empty="no events")


def _event(data: Data) -> str:
    """Its reason, else the single values that it has: the data has all."""
    if reason := data.get("reason"):
        return str(reason)
    single = {name: value for name, value in data.items() if isinstance(value, str | int | float) and value != ""}
    return ", ".join(f"{name} {value}" for name, value in single.items())


def _head(view: Data) -> Data:
    point = view["checkpoint"]
    keys = ("id", "name", "task", "state", "reason", "kind", "pool", "nodes")
    return {key: view[key] for key in keys if view.get(key) not in (None, "")} | {
        "attempt": view["epoch"] or None,
        "priority": view["priority"],
        "submitted": view["submitted_at"],
        "started": view["started_at"],
        "ended": view["ended_at"],
        "ran": ran(view),
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
    """How the newest attempt that started began, where that is not plain."""
    if view["resumed_step"] is not None:
        source = f" from {view['resumed_from']}" if view["resumed_from"] else ""
        return f"at step {view['resumed_step']}{source}"
    again = len(view["attempts"]) > 1 and view["attempts"][-1]["started_at"]
    return "no: it started anew, since no checkpoint was known" if again and not view["script_checkpoint"] else None


def _progress(told: Data | None) -> str | None:
    """`step 400 of 1000 (40 %), about 3 min left at 3.1 steps/s (reported)`; nothing where nothing is known."""
    if not told or not (told["step"] or told["left_from"] != "attained"):
        return None
    of = f" of {told['of']} ({100 * told['step'] / told['of']:.0f} %)" if told["of"] else ""
    left = told["left"] if told["left_from"] != "attained" else "how long is left is not known"
    return f"step {told['step']}{of}, {left}"


def _peak(view: Data) -> str | None:
    """Of the newest attempt that ended where it can be measured."""
    peaks = [bytes_ for a in view["attempts"] if (bytes_ := a.get("peak_memory_bytes"))]
    return size(peaks[-1]) if peaks else None


def failure(data: Data) -> list[TextTable | str]:
    """Where and what, then the traceback of the user's own frames."""
    code = "" if data.get("exit_code") is None else f", exit code {data['exit_code']}"
    said = escape_control(f"rank {data['rank']} on node {data['node']} ({data['kind']}{code}): {data['message']}")
    return [said, escape_control(data["traceback"]).rstrip()] if data.get("traceback") else [said]


def attempts(view: Data) -> TextTable:
    """One line per attempt of a job."""
    columns = ("ATTEMPT", "CANDIDATE", "KIND", "POOL", "PLACED", "RAN", "ENDED AS", "WHY")
    return grid(
        columns,
        (
            (
                a["epoch"],
                a["candidate"] + 1,  # people count from one; the data counts as the job's list does
                a["kind"],
                a["pool"],
                a["placed_at"],
                ran(a | {"known_until": view.get("known_until")}),
                ended_as(a, view),
                a["reason"],
            )
            for a in view["attempts"]
        ),
    )


def ended_as(attempt: Data, view: Data) -> str:
    """What an attempt's end was for its job: `interrupted` where a rank failed, but not by fault of the job's code.

    Those are the ends a job goes on after, except restarts, whose reason says so.
    """
    last = attempt["epoch"] == view["attempts"][-1]["epoch"]
    given_up = last and view["state"] == "FAILED" and view["reason"] == attempt["reason"]
    at_fault = given_up or attempt["reason"].startswith("restart ")
    return "interrupted" if attempt["outcome"] == "failed" and not at_fault else str(attempt["outcome"])


def plan(answer: Data) -> TableStack:
    """Per candidate and devices: fits, or the sentence that refused it; then what would start."""
    rows = [row for candidate in answer["candidates"] for row in _candidate_rows(candidate, answer.get("runs"))]
    table = grid(("CANDIDATE", "WANTS", "WHERE", "ANSWER"), rows, empty="no candidates")
    would = _would_start(answer)
    return TableStack(
        (
            *_state_lines(answer),
            table,
            *(["", escape_control(would)] if would else []),
            *_late(answer),
            *_for_others(answer),
        )
    )


def _late(answer: Data) -> list[str]:
    return [escape_control(told)] if (told := answer.get("late")) else []


def _for_others(answer: Data) -> list[str]:
    """Of a fleet with changes: what they are, and who beside this job would be better or worse off."""
    then = answer.get("if")
    if not then:
        return []
    lines = [f"{other['job']} {other['then']}" for other in then["others"]]
    told = [escape_control(line) for line in lines] or ["nothing would change for other jobs"]
    return ["", escape_control(f"if {' and '.join(then['changes'])}:"), *told]


def _state_lines(answer: Data) -> list[str]:
    """Of a job; a spec that was only asked about has no state."""
    state = answer.get("state")
    if not state:
        return []
    said = escape_control(f"{state}: {answer['reason']}" if answer["reason"] else state)
    missed = [f"it resumed without a part of its state: {escape_control(why)}" for why in answer.get("missed", ())]
    return [said, *missed, *(["it has ended; if it were submitted now:"] if state in TERMINAL else [])]


def _candidate_rows(candidate: Data, runs: Data | None) -> list[tuple[Any, ...]]:
    nodes = f" on each of {candidate['nodes']} nodes" if candidate["nodes"] > 1 else ""
    number_of = "all" if candidate.get("exclusive") else candidate["count"]
    wants = f"{number_of} × {' or '.join(candidate['kinds'])}{nodes}"
    number = candidate["candidate"] + 1
    measured = candidate.get("measured") or {}
    own = {devices for devices, _ in runs["leases"]} if runs and runs["candidate"] == candidate["candidate"] else ()
    fits = [(number, wants, devices, ": ".join(filter(None, ("runs here" if devices in own else "fits",
             measured.get(devices))))) for devices in candidate["fits"]]  # fmt: skip
    refused = [(number, wants, devices or "all", sentence) for devices, sentence in candidate["refused"].items()]
    return [*fits, *refused] or [(number, wants, "", "no node has such a device")]


def _would_start(answer: Data) -> str:
    if runs := answer.get("runs"):
        return f"runs as {_placed(runs)}"
    start = answer["would_start"]
    if answer.get("state") in TERMINAL:
        return ""
    if answer.get("impossible"):
        return f"can never start: {answer['impossible']}"
    if start is None:
        preempt = answer.get("preempt")
        return (
            f"would wait until {', '.join(preempt)} have saved and stopped"
            if preempt
            else "would wait: nothing fits now"
        )
    return f"would start as {_placed(start)}"


def _placed(start: Data) -> str:
    leases = ", ".join(f"{devices} [{', '.join(map(str, numbers))}]" for devices, numbers in start["leases"])
    why = f": {start['reason']}" if start.get("reason") else ""
    return f"candidate {start['candidate'] + 1} on {leases}{why}"


def offers(answer: Data) -> TableStack:
    """One line per place, the best first. Of places without what a candidate asks for only where it has no other."""
    what, worth = ("CHOSEN", "CANDIDATE", "POOL", "RESOURCES"), ("SPEED PER DEVICE", "PRICE/H", "PRICE/M ITEMS")
    apt = {offer["candidate"] for offer in answer["offers"] if offer["when"] != "not_asked_for"}
    found = [o for o in answer["offers"] if o["when"] != "not_asked_for" or o["candidate"] not in apt]
    never = answer["impossible"]
    table = grid((*what, "WAIT", *worth, "WHY"), map(_offer_row, found), empty=f"nothing to offer: {never}")
    return TableStack((table, *(["", escape_control(f"can never start: {never}")] if never and found else [])))


def _offer_row(offer: Data) -> tuple[Any, ...]:
    least, most = offer["min_count"], offer["count"]
    number = f"{most}" if least == most else f"{least} to {most}"
    nodes = f" on each of {offer['nodes']} nodes" if offer["nodes"] > 1 else ""
    return (
        "✓" if offer["chosen"] else "",
        offer["candidate"] + 1,
        offer["pool"],
        f"{number} × {offer['kind']}{nodes}",
        offer["wait"],
        offer["speed"],
        offer["price_per_hour"],
        offer["price_per_million_items"],
        offer["reason"],
    )

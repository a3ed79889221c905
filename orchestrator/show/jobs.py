"""Jobs, one job, and why it runs where it does or nowhere."""

import json
from typing import Any

from orchestrator.core.states import TERMINAL
from orchestrator.show import benchmark
from orchestrator.show.grid import Grid, Stack, facts, grid
from orchestrator.show.text import visible
from orchestrator.show.units import ago, between, size

Data = dict[str, Any]
COLUMNS = ("id", "task", "state", "kind", "pool", "submitted_at", "started_at", "ended_at", "attempts", "reason")
"""The fields of a job that a line of the list is made of."""


def jobs(rows: list[Data]) -> Grid:
    """One line per job."""
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
                ago(j["submitted_at"]),
                ran(j),
                _why(j),
            )
            for j in rows
        ),
        empty="no jobs; `polyfleet submit FILE.yaml` submits one",
    )


def ran(view: Data) -> str:
    """How long a job or an attempt ran. One that ended before it was seen running counts from its placement."""
    placed = [view.get("placed_at"), *(attempt["placed_at"] for attempt in view.get("attempts", []))]
    first = view["started_at"] or (next(filter(None, placed), None) if view["ended_at"] else None)
    return between(first, view["ended_at"])


def _why(job: Data) -> str:
    return "" if job["state"] in ("RUNNING", "SUCCEEDED") else str(job["reason"] or "")


def job(view: Data) -> Stack:
    """All that is known of one job."""
    parts: list[Grid | Stack | str] = [facts(_head(view))]
    if view["failure"]:
        parts += ["", *failure(view["failure"])]
    if view["metrics"]:
        parts += ["", facts({"last report": view["metrics"]})]
    if view["result"]:
        parts += ["", "result", _result(view["task"], view["result"])]
    if view["attempts"]:
        parts += ["", attempts(view)]
    return Stack(tuple(parts))


def _result(task: str, result: Data) -> Stack | str:
    if task == "benchmark" and "host" in result:
        return benchmark.measured(result)
    return visible(json.dumps(result, indent=1, ensure_ascii=False, default=str))


def _head(view: Data) -> Data:
    point = view["checkpoint"]
    keys = ("id", "name", "task", "state", "reason", "kind", "pool", "nodes", "epoch", "priority")
    return {key: view[key] for key in keys if view.get(key) not in (None, "")} | {
        "submitted": view["submitted_at"],
        "started": view["started_at"],
        "ended": view["ended_at"],
        "ran": ran(view),
        "peak memory": _peak(view),
        "restarts": view["restarts"] or None,
        "interruptions": view["interruptions"] or None,
        "resumed at step": view["resumed_step"],
        "checkpoint": f"{point['pool']}:{point['path']} (step {point['step']})" if point else None,
    }


def _peak(view: Data) -> str | None:
    """Of the newest attempt that ended where it can be measured."""
    peaks = [bytes_ for a in view["attempts"] if (bytes_ := a.get("peak_memory_bytes"))]
    return size(peaks[-1]) if peaks else None


def failure(data: Data) -> list[Grid | str]:
    """Where and what, then the traceback of the user's own frames."""
    code = "" if data.get("exit_code") is None else f", exit code {data['exit_code']}"
    said = visible(f"rank {data['rank']} on node {data['node']} ({data['kind']}{code}): {data['message']}")
    return [said, visible(data["traceback"]).rstrip()] if data.get("traceback") else [said]


def attempts(view: Data) -> Grid:
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
                ran(a),
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


def plan(answer: Data) -> Stack:
    """Per candidate and devices: fits, or the sentence that refused it; then what would start."""
    rows = [row for candidate in answer["candidates"] for row in _candidate_rows(candidate)]
    table = grid(("CANDIDATE", "WANTS", "WHERE", "ANSWER"), rows, empty="no candidates")
    would = _would_start(answer)
    return Stack((*_state_lines(answer), table, *(["", visible(would)] if would else [])))


def _state_lines(answer: Data) -> list[str]:
    """Of a job; a spec that was only asked about has no state."""
    state = answer.get("state")
    if not state:
        return []
    said = visible(f"{state}: {answer['reason']}" if answer["reason"] else state)
    return [said, *(["it has ended; for the same job now:"] if state in TERMINAL else [])]


def _candidate_rows(candidate: Data) -> list[tuple[Any, ...]]:
    nodes = f" on each of {candidate['nodes']} nodes" if candidate["nodes"] > 1 else ""
    number_of = "all" if candidate.get("exclusive") else candidate["count"]
    wants = f"{number_of} × {' or '.join(candidate['kinds'])}{nodes}"
    number = candidate["candidate"] + 1
    measured = candidate.get("measured") or {}
    fits = [(number, wants, devices, ": ".join(filter(None, ("fits", measured.get(devices)))))
            for devices in candidate["fits"]]  # fmt: skip
    refused = [(number, wants, devices or "all", sentence) for devices, sentence in candidate["refused"].items()]
    return [*fits, *refused] or [(number, wants, "", "no node has such a device")]


def _would_start(answer: Data) -> str:
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
    leases = ", ".join(f"{devices} [{', '.join(map(str, numbers))}]" for devices, numbers in start["leases"])
    why = f": {start['reason']}" if start.get("reason") else ""
    return f"would start as candidate {start['candidate'] + 1} on {leases}{why}"

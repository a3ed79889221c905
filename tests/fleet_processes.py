"""Finding the processes of a fleet of this machine: nodes, agents, attempts, the head and the server of a home."""

import json
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from cluster.fleet import fleet_record


def marked(name: str, *values: str) -> list[psutil.Process]:
    """Every living process whose environment has that variable with one of these values, wherever it hides."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) in values and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def of_job(job_id: str) -> list[psutil.Process]:
    return marked("POLYFLEET_JOB", job_id)


def of_jobs(job_ids: Collection[str]) -> list[psutil.Process]:
    return marked("POLYFLEET_JOB", *job_ids)


def of_home(home: Path) -> list[psutil.Process]:
    """Every process whose command line names that home."""
    return [p for p in psutil.process_iter(["cmdline"]) if str(home) in " ".join(p.info["cmdline"] or ())]


def ranks(job_id: str, home: Path, node: str = "") -> list[psutil.Process]:
    """The ranks of a training, of those on `node` alone if one is named."""
    folder = str(home / "nodes" / node) if node else ""
    found = [p for p in of_job(job_id) if "workers.tasks.rank_main" in p.cmdline()]
    return [p for p in found if p.environ().get("POLYFLEET_ATTEMPT_DIR", "").startswith(folder)]


def start_of(node: str) -> psutil.Process:
    """The `ray start` of one of our nodes."""
    record = fleet_record.read()
    assert record is not None
    [start] = [p for p in record.processes if p.node == node]
    return psutil.Process(start.pid)


def raylet(node: str) -> psutil.Process:
    return next(c for c in start_of(node).children() if c.name() == "raylet")


def agent(home: Path, node: str) -> psutil.Process:
    folder = str(home / "nodes" / node)
    for process in psutil.process_iter():
        try:
            if process.name().startswith("ray::Agent") and process.environ()["POLYFLEET_NODE_DIR"] == folder:
                return process
        except (psutil.Error, KeyError):
            continue
    raise AssertionError(f"no agent of {node} runs")


def state_server() -> psutil.Process:
    """The process of the head that holds the cluster's state; Ray calls it gcs_server."""
    record = fleet_record.read()
    assert record is not None
    [start] = [p for p in record.processes if p.role == "head"]
    return next(c for c in psutil.Process(start.pid).children(recursive=True) if c.name() == "gcs_server")


def server(home: Path) -> psutil.Process:
    return psutil.Process(json.loads((home / "server.json").read_text())["pid"])


def machine(home: Path, node: str) -> list[psutil.Process]:
    """All of a node: its raylet's family, its agent, supervisors, ranks, and what any of these started."""
    folder = str(home / "nodes" / node)
    found = {p.pid: p for p in _family(start_of(node))}
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), *process.environ().values()]
        except psutil.Error:
            continue
        if any(word == folder or word.startswith(f"{folder}/") for word in words):
            found |= {p.pid: p for p in _family(process)}
    return list(found.values())


def _family(process: psutil.Process) -> Iterator[psutil.Process]:
    yield process
    with suppress(psutil.NoSuchProcess):  # it has ended since it was found
        yield from process.children(recursive=True)


def ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True

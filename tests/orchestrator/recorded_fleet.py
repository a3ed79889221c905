"""A fleet for the real service without Ray: its nodes tell facts that were recorded, and run agents' own code.

What stands in is Ray alone: the list of nodes, the actors (each an ordinary `Agent` in threads of this process), the
reservations and the key-value store. The facts are tests/data/fleet/nodes.json. A job's ranks are real processes.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from patience import LIMIT_S
from ray.experimental import internal_kv

from cluster.errors import FleetError, PolyfleetError
from cluster.fleet import fleet_record
from cluster.fleet.fleet_record import FleetRecord
from cluster.fleet.identity import fleet_identity
from cluster.nodes import connect
from cluster.paths import private_dir
from cluster.serialization import from_plain
from cluster.types import NodeFacts
from cluster.version import VERSION
from orchestrator.core.controller.messages import Submitted
from orchestrator.core.model import Event
from orchestrator.core.timing import NODE_SILENT_S
from orchestrator.runtime.agents import actors, reservations
from orchestrator.runtime.agents.ray_calls import RAY
from orchestrator.services.service import Service
from workers.attempt.supervisor_launcher import SupervisorLauncher
from workers.node.agent import Agent
from workers.protocol.folders import AttemptFolder, AttemptId
from workers.protocol.messages import PROTOCOL

DATA = Path(__file__).parents[1] / "data" / "fleet"
RECORDED = json.loads((DATA / "nodes.json").read_text())["nodes"]
ADDRESS = "127.0.0.1:1"
STAMP = "2026-11-20T23:14:53.123456Z"


@cache
def starter() -> SupervisorLauncher:
    """One for all agents of this process: each would take a process of its own to start supervisors."""
    return SupervisorLauncher.start_new()


class KeyValueStore:
    """Ray's: text or bytes in, bytes out."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def put(self, key: str, value: str, overwrite: bool = True) -> None:
        if overwrite or key not in self.values:
            self.values[key] = value.encode()

    def delete(self, key: str) -> None:
        self.values.pop(key, None)


class RecordedAgent(Agent):
    """An agent in folders of a test; what it finds on its node is recorded."""

    def __init__(self, facts: dict[str, Any], home: Path, store: KeyValueStore):
        storage = home / "storage"
        self.facts = facts | {"storage": str(storage / facts["pool"]), "protocol": PROTOCOL}
        where = (home / "nodes" / facts["node"], storage / facts["pool"], facts["node"], facts["pool"])
        identity, shared = fleet_identity(home), private_dir(home / "fences")
        super().__init__(*where, facts["backend"], identity, shared, starter())
        self._fences._read_store = lambda key, _limit_s: store.get(key)
        self._identity = replace(self._identity, neighbours={pool: storage / pool for pool in facts["neighbours"]})

    def _discover(self) -> None:
        found = from_plain(NodeFacts, self.facts)
        self._discovered_s, self._devices, self._findings = time.monotonic(), found.devices, found.findings

    def poll(self, generation: int, cursors: Any, known: Any, timeout_s: float, *rest: Any) -> dict[str, Any]:
        """The first is answered at once: a test does not wait until nothing has happened for two seconds."""
        first, self.watched = not getattr(self, "watched", False), True
        return super().poll(generation, cursors, known, 0.0 if first else timeout_s, *rest)

    def _watch_fences(self) -> None:
        """It would never end."""

    def _facts(self) -> dict[str, Any]:
        self._facts_sent_s = time.monotonic()
        return self.facts

    def ran(self, attempt: AttemptId) -> None:
        """It finds that folder, as the next agent would."""
        self._attempts._ids.setdefault(attempt.job, set()).add(attempt)

    def stop_all(self) -> None:
        """Ends what a test left running."""
        for attempt in self._attempts.live_attempts():
            self._attempts.stop(attempt.id.job, attempt.id.epoch, "cancel")


class Ref:
    """What a call of an actor's method returns at once, as Ray's ObjectRef."""

    def __init__(self, value: "Future[Any]"):
        self._value = value

    def future(self) -> "Future[Any]":
        return self._value


class Method:
    def __init__(self, actor: "Actor", name: str):
        self._actor, self._name = actor, name

    def remote(self, *arguments: Any) -> Ref:
        def call() -> Any:
            if not self._actor.heard.is_set() and self._name != "poll":
                raise FleetError(f"{self._name} gave no answer")  # what a call to a frozen node ends with, at once
            assert self._actor.heard.wait(LIMIT_S)
            given = [a.future().result(LIMIT_S) if isinstance(a, Ref) else a for a in arguments]
            return getattr(self._actor.agent, self._name)(*given)

        try:
            return Ref(self._actor.threads.submit(call))
        except RuntimeError:  # the threads have ended
            dead: Future[Any] = Future()
            dead.set_exception(FleetError("the actor is dead"))
            return Ref(dead)


class Actor:
    """A handle of an actor: methods with `remote`, called in threads of the actor's own."""

    def __init__(self, agent: RecordedAgent):
        self.agent = agent
        self.threads = ThreadPoolExecutor(16, thread_name_prefix=agent.facts["node"])
        self.heard = threading.Event()
        self.heard.set()

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)


def answer(ref: Ref, what: str, timeout_s: float) -> Any:
    """As actors.answer."""
    try:
        return ref.future().result(timeout_s)
    except PolyfleetError:
        raise
    except TimeoutError:
        raise FleetError(f"{what} gave no answer within {timeout_s:.0f} s") from None
    except Exception as e:
        raise FleetError(f"{what} failed: {e!r}") from e


class RecordedFleet:
    """The fleet of one home. `patch` is a MonkeyPatch: what belongs to Ray is put back when it is undone."""

    def __init__(self, home: Path, patch: Any):
        self._home = home
        self._lock = threading.Lock()
        self._by_id: dict[str, Actor] = {}
        self.store = KeyValueStore()
        self.facts = {facts["ray_node_id"]: dict(facts) for facts in RECORDED}
        patch.setenv("POLYFLEET_REPAIR", "off")
        for module, name, stand_in in (
            (actors, "nodes", self._nodes),
            (actors, "start_agent", self._make),
            (actors, "restart_actor", lambda actor: None),
            (actors, "end_actor", lambda actor: None),
            (actors, "get_result", answer),
            (connect, "prepare", lambda record: None),
            (connect, "connect", lambda record: None),
            (connect, "disconnect", lambda: None),
            (reservations, "reserve", lambda *_: None),
            (reservations, "release", lambda attempt: None),
            (reservations, "release_now", lambda attempt: None),
            (reservations, "list_reserved", frozenset),
            (reservations, "list_reserved_now", frozenset),
            (internal_kv, "_internal_kv_get", self.store.get),
            (internal_kv, "_internal_kv_put", self.store.put),
            (internal_kv, "_internal_kv_del", self.store.delete),
        ):
            patch.setattr(module, name, stand_in)

    def _nodes(self) -> list[actors.NodeRow]:
        return [
            actors.NodeRow(i, f["node"], True, True, f["host"], f["address"], {"CPU": float(f["cpu_count"])}, {})
            for i, f in self.facts.items()
        ]

    def _make(self, node_id: str, cpus: float, deliver: object) -> Actor:
        with self._lock:
            if node_id not in self._by_id:
                self._by_id[node_id] = Actor(RecordedAgent(self.facts[node_id], self._home, self.store))
            return self._by_id[node_id]

    def agent(self, node: str) -> RecordedAgent:
        return next(a.agent for a in self._by_id.values() if a.agent.facts["node"] == node)

    def up(self) -> None:
        """As `polyfleet up` leaves it: recorded, with its nodes there to be found."""
        pools = {f["pool"]: {"backend": f["backend"], "nodes": 1, "price_per_hour": 0.0} for f in self.facts.values()}
        fleet_record.write(FleetRecord("demo", "up", ADDRESS, VERSION, time.time(), "", pools=pools))

    def down(self, service: Service) -> None:
        """As `polyfleet down` leaves it."""
        fleet_record.remove()
        _until(service, lambda: service.runtime.problem)

    def lose(self, service: Service, node: str) -> None:
        """Ray lists it no longer."""
        self.facts = {i: f for i, f in self.facts.items() if f["node"] != node}
        _until(service, lambda: not service.agents[node].ready)

    @contextmanager
    def silent(self, service: Service, node: str) -> Iterator[None]:
        """Frozen, or cut off, and not lost: its agent answers nothing meanwhile."""
        actor = next(a for a in self._by_id.values() if a.agent.facts["node"] == node)
        actor.heard.clear()
        try:
            _until(service, lambda: service.agents[node].silent_s(time.monotonic()) > NODE_SILENT_S)
            yield
        finally:
            actor.heard.set()

    def tell(self, service: Service, node: str, **facts: Any) -> None:
        """From its agent's next answer on."""
        self.agent(node).facts |= facts
        self.agent(node)._facts_sent_s = float("-inf")
        wanted = from_plain(NodeFacts, self.agent(node).facts)
        _until(service, lambda: (agent := service.agents.get(node)) is not None and agent.facts == wanted)

    def wait_until_known(self, service: Service) -> None:
        """Until every node has told its facts, and what runs there."""
        _until(service, lambda: not service.runtime.problem)
        _until(service, lambda: len(service.runtime.snapshot().devices) == len(self.facts))
        _until(service, lambda: all(devices.schedulable for devices in service.runtime.snapshot().devices))

    def hold(self, service: Service) -> None:
        """From now on jobs wait: the fleet's record says that it is stopping."""
        recorded = fleet_record.read()
        assert recorded is not None
        fleet_record.write(replace(recorded, state="stopping"))
        _until(service, lambda: service.runtime.problem)

    def close(self, service: Service) -> None:
        """Of a service that is closed: threads it has left must not reach the real Ray once that is put back. Asked for
        anything, Ray would start a cluster here, or end this process where it finds none.
        """
        service.agents.call = _gone  # type: ignore[method-assign]
        end = time.monotonic() + LIMIT_S
        while RAY._calls and time.monotonic() < end:
            time.sleep(0.002)
        for actor in self._by_id.values():
            actor.heard.set()
            actor.agent.stop_all()
            actor.agent._send_facts_now()  # a `poll` under way would keep all of this for seconds
            actor.threads.shutdown(wait=False)

    def printed(self, job: str, lines: list[str]) -> None:
        """These lines are what rank 0 of the job's first attempt printed, in place of what it did, on the node where it
        ran; on cpu-0 where no attempt really ran.
        """
        ran = [*(self._home / "nodes").glob(f"*/attempts/{job}.1.0")]
        log = AttemptFolder(ran[0] if ran else self._home / "nodes" / "cpu-0" / "attempts" / f"{job}.1.0").log(0)
        log.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(f"{STAMP} out {line}\n" for line in lines)
        log.write_bytes(text.encode("utf-8", "surrogatepass"))
        for actor in () if ran else self._by_id.values():
            if actor.agent.facts["node"] == "cpu-0":
                actor.agent.ran(AttemptId(job, 1, 0))


def _gone(node: str, method: str, *_: Any, **__: Any) -> Any:
    raise FleetError(f"node {node}: the test has ended")


def _until(service: Service, truth: Callable[[], Any]) -> None:
    """The controller looks at once, and until it has seen it."""
    end = time.monotonic() + LIMIT_S
    while not truth():
        assert time.monotonic() < end, "the controller has not seen it"
        service.runtime.post(Submitted(()))  # it looks at once
        time.sleep(0.005)


def happened(service: Service, job: str, run: str, **data: Any) -> None:
    """The events of a recorded run (tests/data/fleet/runs.json) happen to a job that waits; `data` changes the last."""
    events = json.loads((DATA / "runs.json").read_text())["runs"][run]
    begun_s = time.time()
    for number, told in enumerate(events, 1):
        changed = told["data"] | (data if number == len(events) else {})
        service.jobs_table.commit([Event(job, told["event"], told["epoch"], begun_s + told["after_s"], changed)])


@contextmanager
def measuring(service: Service) -> Iterator[None]:
    """Each run that begins meanwhile finds its lines in the store, as two sessions measured them."""
    done = threading.Event()

    def measure() -> None:
        told: set[str] = set()
        while not done.wait(0.01):
            for known in service.store.benchmarks.runs():
                if known["run"] not in told:
                    told.add(known["run"])
                    for line in benchmark_lines():
                        service.store.benchmarks.append(known["run"], line)

    thread = threading.Thread(target=measure)
    thread.start()
    yield
    done.set()
    thread.join()


def benchmark_lines() -> Iterator[dict[str, Any]]:
    """Two columns, one case, twelve rounds; tpu:emulated takes twice as long."""
    columns = (("cpu", "cpu", 0.010), ("tpu:emulated", "xla", 0.020))
    for kind, pool, _ in columns:
        facts = {"kind": kind, "pool": pool, "emulated": ":" in kind}
        yield {"line": "target", "target": kind, "host": "h", "facts": facts}
    case = {
        "case": "mlp/forward/b64-d256", "workload": "mlp", "family": "model", "mode": "forward", "item": "sample",
        "items": 64, "flops": 1e9, "min_bytes": 1e6, "precision": "fp32", "level": "O1", "regime": "hot",
    }  # fmt: skip
    for kind, _, seconds in columns:
        blocks = [
            {"round": n, "calls": 1, "parts_s": [seconds * (1 + n / 1000)], "cpu_s": seconds, "preempted": 0,
             "single_call_s": seconds, "at": 0.0}
            for n in range(12)
        ]  # fmt: skip
        yield {
            "line": "result", "id": f"mlp@{kind}", "target": kind, "host": "h", "status": "measured", "reason": "",
            **case, "accuracy": {"ok": True}, "blocks": blocks, "control_blocks": blocks, "first_call_s": 1.0,
            "host_before": None, "host_after": None,
        }  # fmt: skip
    yield {"line": "ended", "state": "SUCCEEDED", "reason": ""}

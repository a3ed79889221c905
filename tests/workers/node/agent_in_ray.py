"""Run by test_agent_in_ray.py: an agent as the server makes it, killed by signal 9 amid an attempt, and how our code is
sent to a node. Prints JSON."""

import dataclasses
import json
import os
import queue
import shutil
import signal
import tempfile
import time
from pathlib import Path

import ray

from cluster.errors import FleetError
from cluster.fleet.identity import fleet_identity
from cluster.paths import home
from orchestrator.runtime.agents import actors, code_delivery, fences
from workers.node.agent import Agent
from workers.protocol.messages import Order

PATIENCE = float(os.environ.get("POLYFLEET_TEST_PATIENCE", "1"))
DEADLINE_S = 180.0 * PATIENCE
ATTEMPTS = Path(os.environ["POLYFLEET_NODE_DIR"]) / "fleets" / fleet_identity(home()) / "attempts"
COMMAND = "mkfifo gate; env; cat /proc/$PPID/environ; echo ready; cat gate"


def order(job, command, **more):
    return dataclasses.asdict(
        Order(
            job=job, epoch=1, task="run", backend="cpu", kind="cpu", emulated=False, devices=(0,), node_rank=0, nodes=1,
            first_rank=0, ranks=1, world_size=1, master_address="127.0.0.1", master_port=29500,
            command=("sh", "-c", command), **more,
        )
    )  # fmt: skip


def until(true, what):
    deadline = time.monotonic() + DEADLINE_S
    while not (found := true()):
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.05)
    return found


def call(method, *args):
    """As the controller does: an actor that is being restarted is asked again."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return ray.get(getattr(agent, method).remote(*args), timeout=DEADLINE_S)
        except ray.exceptions.RayActorError:
            if time.monotonic() > deadline:
                raise


def ended(job):
    reports = call("poll", 1, {}, {}, 0.2)["reports"]
    return next((r["outcome"] for r in reports if r["job"] == job and r["phase"] == "ended"), None)


def supervisor(job):
    return json.loads((ATTEMPTS / f"{job}.1.0/supervisor.json").read_text())["pid"]


temporary = tempfile.mkdtemp(prefix="pf-", dir="/tmp")
ray.init(
    address="local", num_cpus=1, object_store_memory=80 << 20, include_dashboard=False, namespace="polyfleet",
    _temp_dir=temporary, log_to_driver=False,
)  # fmt: skip
node_id = ray.get_runtime_context().get_node_id()
agent = actors.start_agent(node_id)

facts = call("register", 1)["facts"]
assert facts["ray_node_id"] == node_id
call("start", 1, order("j", COMMAND, lease_s=10 * DEADLINE_S), {"KEY": "s3cr3t"})
gate = ATTEMPTS.parent / "shared/j.1.0/work/0/gate"
until(gate.exists, "the attempt runs")
pids = [supervisor("j")]
os.kill(facts["agent_pid"], signal.SIGKILL)
second = until(
    lambda: (pid := call("register", 1)["facts"]["agent_pid"]) != facts["agent_pid"] and pid, "the agent is back"
)
niceness = os.getpriority(os.PRIO_PROCESS, second)
phases = [r["phase"] for r in call("poll", 1, {}, {}, 1.0)["reports"]]
assert phases == ["running"], phases
pids.append(supervisor("j"))
gate.write_text("went on\n")
outcome = until(lambda: ended("j"), "the adopted attempt ends")
log = call("logs", "j", 1, 0, 0, 1 << 20)["data"]

lease_s = 6.0 * PATIENCE
call("start", 1, order("k", "sleep 600", lease_s=lease_s), {})
assert fences.acquire("k", 1, is_ours=False) == 0
until((ATTEMPTS / "k.1.0/started").exists, "k runs")
silent_until = time.monotonic() + lease_s + 2.0
while time.monotonic() < silent_until:
    assert not (ATTEMPTS / "k.1.0/outcome.json").exists(), "the store said that nobody took over"
    time.sleep(0.1)
answers = queue.SimpleQueue()
fences.raise_to("k", 2, answers.put)
assert answers.get(timeout=DEADLINE_S) == 2
until((ATTEMPTS / "k.1.0/outcome.json").exists, "k is fenced off")


class Hanging(Agent):
    """Its starts take until the test is over."""

    def start(self, generation, order, secrets):
        time.sleep(600)


hanging = actors.with_concurrency_groups(Hanging).options(max_concurrency=16).remote(Path(temporary, "hanging"))
starts = [hanging.start.remote(1, {}, {}) for _ in range(40)]
answers = [ray.get(hanging.register.remote(1), timeout=DEADLINE_S)["generation"]]
watches = [hanging.poll.remote(1, {}, {}, 0.0) for _ in range(3)]
answers += [len(ray.get(watch, timeout=DEADLINE_S)["reports"]) for watch in watches]
answers += [ray.get(hanging.stop.remote(1, "h", 1, "cancel"), timeout=DEADLINE_S)]
still = len(ray.wait(starts, num_returns=1, timeout=0)[1])

sent, send = [], code_delivery._send
code_delivery._send = lambda ray_id: sent.append(ray_id) or send(ray_id)
deliveries, waits = code_delivery.CodeDeliveries(), []
for code_delivery.LIMIT_S in (0.0, 0.0, DEADLINE_S):
    try:
        waits.append(Path(deliveries.deliver(node_id), "workers/node/agent.py").is_file())
    except FleetError as e:
        waits.append(e.message)

print(
    json.dumps(
        {
            "agents": [facts["agent_pid"], second],
            "supervisors": pids,
            "niceness": niceness,
            "state": outcome["state"],
            "fenced": ended("k")["state"],
            "log": log,
            "beside_hanging_starts": [*answers, still],
            "deliveries": [len(sent), *waits],
        }
    )
)
ray.shutdown()
shutil.rmtree(temporary, ignore_errors=True)

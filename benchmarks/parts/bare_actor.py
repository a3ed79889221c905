"""Child: Ray by hand in the fleet that is up. An actor is started, told to run a command, and ended."""

import subprocess
import sys
from time import perf_counter
from typing import Any

from helper import answer

from cluster.fleet import fleet_record
from cluster.fleet.identity import fleet_identity, namespace
from cluster.nodes import connect
from cluster.paths import home

NODE = sys.argv[1]
COMMAND = sys.argv[2:]
living: list[Any] = []


def join() -> float:
    """`import ray` and `ray.init`."""
    start = perf_counter()
    record = fleet_record.read()
    connect.prepare(record)
    connect.connect(record)
    return perf_counter() - start


def start_and_call() -> float:
    import ray

    start = perf_counter()
    actor = _actor()
    ray.get(actor.run.remote(COMMAND))
    elapsed_s = perf_counter() - start
    ray.kill(actor)
    return elapsed_s


def call() -> float:
    """One call, answer awaited, of an actor that lives already."""
    import ray

    if not living:
        living.append(_actor())
        ray.get(living[0].nothing.remote())
    start = perf_counter()
    ray.get(living[0].nothing.remote())
    return perf_counter() - start


def register() -> float:
    """The node's agent looks for its devices anew and tells all its facts."""
    import ray

    agent = ray.get_actor(f"agent-{NODE}", namespace=namespace(fleet_identity(home())))
    start = perf_counter()
    ray.get(agent.register.remote(0))
    return perf_counter() - start


def _actor() -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(NODE, soft=False)
    return ray.remote(Runner).options(num_cpus=0, scheduling_strategy=there).remote()


class Runner:
    def run(self, command: list[str]) -> int:
        return subprocess.run(command, capture_output=True, check=True).returncode

    def nothing(self) -> None:
        return None


answer({"join": join, "start_and_call": start_and_call, "call": call, "register": register}, sys.stdin)

"""One device being measured: it opens arms, times a block of one when told to, and says what the machine is like.

Who decides what is measured when, and when it is enough, sits elsewhere (orchestrator/benchmark/round_runner.py):
rounds go over all devices of a machine in turns, so no device may keep its own time.
"""

import gc
import os
import threading
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import torch

from cluster.errors import PolyfleetError, UserError, nearest
from workers.backends.base import BaseBackend
from workers.backends.parts.device_transfer import map_tensors
from workers.benchmark import catalogue, energy, host
from workers.benchmark import measurement as arms
from workers.benchmark.case import Case
from workers.benchmark.case_builder import Built, build, mean_square
from workers.benchmark.collectives import open_collective
from workers.benchmark.measurement import CaseSettings, PreparedCase, Unsupported
from workers.benchmark.repeated_call import ModelState
from workers.benchmark.timing import Timer
from workers.benchmark.transfer_measurement import prepare_transfer
from workers.benchmark.transfers import COLLECTIVES
from workers.discovery.nvidia_state import card_state
from workers.optimizers.output_difference import first_tensor
from workers.optimizers.pass_context import Sample
from workers.tasks.json_values import plain

ENERGY_S = 5.0
TIMED_OUT = 124
"""Exit code of a session that was stuck: a call into a library cannot be ended, only its process."""
Message = dict[str, Any]
UserBuild = Callable[[], tuple[Any, Any]]
"""Makes (module, sample) of the user's own model."""


class Session:
    """`handle` takes {"do": verb, …} and answers with plain data. Raises UserError for what it does not understand."""

    def __init__(self, backend: BaseBackend, seed: int = 0, user_build: UserBuild | None = None):
        self._backend, self._seed, self._user_build = backend, seed, user_build
        self._timer = Timer(backend)
        self._cache_bytes = _cache_bytes(backend)
        self._arms: dict[str, PreparedCase] = {}
        self._energy_source, self._joules = energy.counter(backend)
        self._others = host.Others()
        self._verbs: dict[str, Callable[..., Any]] = {
            "describe": self.describe,
            "state": self.state,
            "open": self._answer_open,
            "block": self._answer_block,
            "energy": self.energy,
            "close": self.close,
        }

    def handle(self, message: Message) -> Any:
        given = dict(message)
        verb, limit_s = str(given.pop("do", "")), float(given.pop("limit_s", 0) or 0)
        if verb not in self._verbs:
            raise UserError(f"a session does not understand {verb!r}", nearest(verb, tuple(self._verbs)))
        with _Watchdog(limit_s):
            return plain(self._verbs[verb](**given))

    def describe(self) -> Message:
        info = self._backend.get_device_info(self._backend.device_id)
        return {
            "host": host.identity(),
            "device": info.to_dict(),
            "emulated": self._backend.emulated,
            "torch": str(torch.__version__),
            "versions": info.runtime_versions,
            "threads": torch.get_num_threads(),
            "timer": self._timer.name,
            "timer_overhead_s": self._timer.overhead_s,
            "cache_bytes": self._cache_bytes,
            "energy": self._energy_source,
            "counts_energy": self._joules is not None,
            "pid": os.getpid(),
        }

    def state(self, ours: Sequence[int] = ()) -> Message:
        """Of the machine and this device; `ours` are the processes of the run."""
        told = host.state() | {"busiest": self._others.busiest(ours)}
        device = _device_state(self._backend)
        if "pids" in device:
            device["others"] = [pid for pid in device.pop("pids") if pid not in (*ours, os.getpid())]
        return told | ({"device": device} if device else {})

    def open(self, arm: str, cell: Message) -> Message:
        """Facts of the arm. Raises Unsupported with the reason where this device cannot, and whatever the workload
        raises."""
        try:
            self._arms[arm] = self._open(cell)
        finally:
            gc.collect()
        return self._arms[arm].facts

    def block(self, arm: str) -> Message:
        """One block of an open arm, and the wait for one call alone. Raises whatever the workload raises."""
        opened = self._opened(arm)
        timer = opened.timer or self._timer
        taken = timer.block(opened.call, opened.calls, opened.parts, opened.refill)
        return {
            "calls": taken.calls,
            "parts_s": list(taken.parts_s),
            "cpu_s": taken.cpu_s,
            "preempted": taken.preempted,
            "alone_s": timer.alone(opened.call, opened.refill),
            "at": time.time(),
        }

    def energy(self, arm: str) -> Message:
        """{"joules_per_call"} over at least five seconds, all that the package or card drew; {} without a counter, and
        where inputs are restored between calls.
        """
        opened, calls = self._opened(arm), 0
        if self._joules is None or opened.refill is not None:  # the counter does not tell calls from what lies between
            return {}
        joules, begun = self._joules(), time.monotonic()
        while (elapsed_s := time.monotonic() - begun) < ENERGY_S:
            calls += (opened.timer or self._timer).block(opened.call, opened.calls).calls
        return {"joules_per_call": (self._joules() - joules) / calls, "watts": (self._joules() - joules) / elapsed_s}

    def close(self) -> Message:
        for arm in self._arms.values():
            arm.end()
        self._arms.clear()
        gc.collect()
        self._backend.empty_cache()
        return {}

    def _answer_open(self, arm: str, cell: Message) -> Message:
        """What a workload raises, the user's own model above all, is told in its cell: {"unsupported": reason} where
        this device cannot, {"failed": message} where it did not."""
        try:
            return self.open(arm, cell)
        except Unsupported as e:
            return {"unsupported": str(e)}
        except Exception as e:
            return {"failed": _told(e)}

    def _answer_block(self, arm: str) -> Message:
        self._opened(arm)
        try:
            return self.block(arm)
        except Exception as e:
            return {"failed": _told(e)}

    def _opened(self, arm: str) -> PreparedCase:
        if arm not in self._arms:
            raise UserError(f"no arm {arm!r} is open", "open it first")
        return self._arms[arm]

    def _open(self, given: Message) -> PreparedCase:
        self._timer.case_s = given.get("case_s", inf)
        if given["case"].startswith("user/"):
            return self._open_user(given)
        case = catalogue.find(given["case"])
        opened = self._open_case(case, given)
        opened.facts["min_bytes"] = case.bytes({"fp32": 4}.get(given["precision"], 2))
        return opened

    def _open_case(self, case: Case, given: Message) -> PreparedCase:
        if case.definition.name in COLLECTIVES:
            return open_collective(case, self._backend, self._timer)
        if case.definition.family == "transfer":
            return prepare_transfer(case, self._backend, self._timer)
        is_model = case.definition.family == "model"
        cell = CaseSettings(
            case.name, given["precision"], given["level"], given.get("regime", "hot"), case.mode == "train",
            case.definition.depth(case.sizes), case.definition.roundings(case.sizes), case.flops, is_model,
            given.get("kernels", ""),
        )  # fmt: skip
        return arms.prepare_case(cell, build(case, self._seed), self._backend, self._timer, self._cache_bytes)

    def _open_user(self, given: Message) -> PreparedCase:
        """The user's own model: its operations are counted by torch, not by a formula."""
        if self._user_build is None:
            raise UserError("this session was given no model of a user", "name one with --entry")
        module, sample = self._user_build()
        if sample is None:
            raise UserError("a benchmark needs inputs", "add sample_input(batch_size) beside the model's factory")
        train = given["case"].endswith("/train")
        flops = _counted_flops(module, sample)
        depth, roundings = _depth(module)
        cell = CaseSettings(
            given["case"], given["precision"], given["level"], "hot", train, depth, roundings, flops, True,
            given.get("kernels", ""),
        )  # fmt: skip
        opened = arms.prepare_case(
            cell, Built(module, sample, mean_square), self._backend, self._timer, self._cache_bytes
        )
        opened.facts |= {
            "flops": flops * (3 if train else 1),
            "flops_source": "torch.utils.flop_counter",
            "items": int(first_dimension(sample)),
        }
        return opened


def first_dimension(sample: Sample) -> int:
    """What a batch is counted by."""
    found: list[int] = []
    map_tensors((sample.args, sample.kwargs), lambda t: found.append(t.shape[0]) if t.dim() else None)
    return found[0] if found else 1


def _device_state(backend: BaseBackend) -> Message:
    """Clocks, heat, power and users of a card; {} of devices that nobody asks."""
    if backend.BACKEND_NAME != "nvidia":
        return {}
    return card_state(str(backend.get_device_info(backend.device_id).uuid))


def _counted_flops(module: Any, sample: Sample) -> float:
    from torch.utils.flop_counter import FlopCounterMode

    given, state = sample.copy(), ModelState(module)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        first_tensor(module.eval()(*given.args, **given.kwargs))
    state.restore()
    return float(counter.get_total_flops())


def _depth(module: Any) -> tuple[float, float]:
    """(the longest sum of any layer, the number of layers): how far errors may add up."""
    rows = [p.numel() // p.shape[0] for p in module.parameters() if p.dim() > 1]
    return float(max(rows, default=1)), float(max(len(rows), 1))


def _cache_bytes(backend: BaseBackend) -> int:
    """Of the cache nearest to memory that a cold call must not find its inputs in."""
    if backend.device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(backend.device)
        return int(getattr(properties, "L2_cache_size", 0)) or 256 << 20
    return host.last_level_cache_bytes()


def _told(error: BaseException) -> str:
    if isinstance(error, PolyfleetError):
        return f"{error.message}; {error.remedy}" if error.remedy else error.message
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


class _Watchdog:
    """Ends this process when its block lasts longer than it may; 0: no limit."""

    def __init__(self, limit_s: float):
        self._timer = threading.Timer(limit_s, os._exit, (TIMED_OUT,)) if limit_s > 0 else None

    def __enter__(self) -> None:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

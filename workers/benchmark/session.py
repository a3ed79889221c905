"""Session that measures one device: on request it prepares cases, times blocks, and reports the machine's state.

orchestrator/benchmark/round_runner.py decides what is measured when, and when to stop: rounds alternate between all
devices of a machine, so a session never decides by itself when to measure.
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
from workers.benchmark import energy, host
from workers.benchmark import measurement as preparation
from workers.benchmark.cases import catalogue
from workers.benchmark.cases.case import Case
from workers.benchmark.cases.case_builder import BuiltCase, build, mean_square
from workers.benchmark.cases.operations import COLLECTIVES
from workers.benchmark.collectives import prepare_collective
from workers.benchmark.measurement import CaseSettings, PreparedCase, Unsupported
from workers.benchmark.repeated_call import ModelState
from workers.benchmark.transfer_measurement import prepare_transfer
from workers.devices.backends.base import BaseBackend
from workers.devices.backends.device_transfer import map_tensors
from workers.devices.discovery.vendors.nvidia_state import card_state
from workers.measurement.inputs import Sample
from workers.measurement.output_difference import first_tensor
from workers.measurement.timing import Timer
from workers.protocol.json_values import plain

ENERGY_S = 5.0
TIMED_OUT = 124
"""Exit code of a session that hung: a call into a library can only be ended by ending its process."""
Message = dict[str, Any]
UserBuild = Callable[[], tuple[Any, Any]]
"""Function that builds (module, sample) of the user's own model."""


class Session:
    """`handle` takes {"do": verb, …} and returns plain data. Raises UserError for an unknown verb."""

    def __init__(self, backend: BaseBackend, seed: int = 0, user_build: UserBuild | None = None):
        self._backend, self._seed, self._user_build = backend, seed, user_build
        self._timer = Timer(backend)
        self._cache_bytes = _cache_bytes(backend)
        self._prepared_cases: dict[str, PreparedCase] = {}
        self._energy_source, self._joules = energy.counter(backend)
        self._busy_processes = host.BusyProcesses()
        self._verbs: dict[str, Callable[..., Any]] = {
            "describe": self.describe,
            "state": self.state,
            "prepare": self._open_or_error,
            "run": self._block_or_error,
            "energy": self.energy,
            "check": self.check,
            "close": self.close,
        }

    def handle(self, message: Message) -> Any:
        arguments = dict(message)
        verb, limit_s = str(arguments.pop("do", "")), float(arguments.pop("limit_s", 0) or 0)
        if verb not in self._verbs:
            raise UserError(f"unknown request {verb!r} to a session", nearest(verb, tuple(self._verbs)))
        with _Watchdog(limit_s):
            return plain(self._verbs[verb](**arguments))

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
        """Return the state of the machine and this device. `ours` are the process ids of the run."""
        machine = host.state() | {"busiest": self._busy_processes.busiest(ours)}
        device = _device_state(self._backend)
        if "pids" in device:
            device["others"] = [pid for pid in device.pop("pids") if pid not in (*ours, os.getpid())]
        return machine | ({"device": device} if device else {})

    def open_case(self, measurement: str, case: Message) -> Message:
        """Prepare a case with the settings `case` under the id `measurement`, and return facts about it.

        Raises Unsupported with the reason if this device cannot run it, and any exception of the workload."""
        try:
            self._prepared_cases[measurement] = self._open(case)
        finally:
            gc.collect()
        return self._prepared_cases[measurement].facts

    def run_block(self, measurement: str) -> Message:
        """Time one block of a prepared case, and the latency of a single call. Raises what the workload raises."""
        prepared = self._find_case(measurement)
        timer = prepared.timer or self._timer
        timed = timer.block(prepared.call, prepared.calls, prepared.parts, prepared.refill)
        return {
            "calls": timed.calls,
            "parts_s": list(timed.parts_s),
            "cpu_s": timed.cpu_s,
            "preempted": timed.preempted,
            "single_call_s": timer.single_call_s(prepared.call, prepared.refill),
            "at": time.time(),
        }

    def energy(self, measurement: str) -> Message:
        """Measure the energy that the CPU packages or the card use: {"joules_per_call", "watts"} over at least 5 s.

        Returns {} without a counter, or if inputs are restored between calls.
        """
        prepared, calls = self._find_case(measurement), 0
        if self._joules is None or prepared.refill is not None:  # the counter would include the time of restoring
            return {}
        joules, started = self._joules(), time.monotonic()
        while (elapsed_s := time.monotonic() - started) < ENERGY_S:
            calls += (prepared.timer or self._timer).block(prepared.call, prepared.calls).calls
        return {"joules_per_call": (self._joules() - joules) / calls, "watts": (self._joules() - joules) / elapsed_s}

    def check(self, measurement: str) -> Message:
        """Check after the last block that all calls had the same inputs and state: {"failed": message} if not."""
        try:
            self._find_case(measurement).check()
        except Exception as e:
            return {"failed": _error_message(e)}
        return {}

    def close(self) -> Message:
        for measurement in self._prepared_cases.values():
            measurement.end()
        self._prepared_cases.clear()
        gc.collect()
        self._backend.empty_cache()
        return {}

    def _open_or_error(self, measurement: str, case: Message) -> Message:
        """Call `open_case` and report exceptions of the workload, such as the user's own model, as its result:
        {"unsupported": reason} if this device cannot run it, {"failed": message} for any other."""
        try:
            return self.open_case(measurement, case)
        except Unsupported as e:
            return {"unsupported": str(e)}
        except Exception as e:
            return {"failed": _error_message(e)}

    def _block_or_error(self, measurement: str) -> Message:
        self._find_case(measurement)
        try:
            return self.run_block(measurement)
        except Exception as e:
            return {"failed": _error_message(e)}

    def _find_case(self, measurement: str) -> PreparedCase:
        if measurement not in self._prepared_cases:
            raise UserError(f"no measurement {measurement!r} is open", 'send "prepare" first')
        return self._prepared_cases[measurement]

    def _open(self, request: Message) -> PreparedCase:
        self._timer.case_s = request.get("case_s", inf)
        if request["case"].startswith("user/"):
            return self._open_user(request)
        case = catalogue.find(request["case"])
        prepared = self._open_case(case, request)
        prepared.facts["min_bytes"] = case.bytes({"fp32": 4}.get(request["precision"], 2))
        return prepared

    def _open_case(self, case: Case, request: Message) -> PreparedCase:
        if case.definition.name in COLLECTIVES:
            return prepare_collective(case, self._backend, self._timer)
        if case.definition.family == "transfer":
            return prepare_transfer(case, self._backend, self._timer)
        is_model = case.definition.family == "model"
        settings = CaseSettings(
            case.name, request["precision"], request["level"], request.get("regime", "hot"), case.mode == "train",
            case.depth, case.roundings, case.flops, is_model, request.get("kernels", ""), case.mode == "backward",
        )  # fmt: skip
        return preparation.prepare_case(
            settings, build(case, self._seed), self._backend, self._timer, self._cache_bytes
        )

    def _open_user(self, request: Message) -> PreparedCase:
        """Prepare the user's own model. torch counts its operations, since there is no formula."""
        if self._user_build is None:
            raise UserError("this session has no user model", "pass --entry to name one")
        module, sample = self._user_build()
        if sample is None:
            raise UserError("a benchmark needs inputs", "add sample_input(batch_size) beside the model's factory")
        train = request["case"].endswith("/train")
        flops = _count_flops(module, sample)
        depth, roundings = _depth(module)
        settings = CaseSettings(
            request["case"], request["precision"], request["level"], "hot", train, depth, roundings, flops, True,
            request.get("kernels", ""),
        )  # fmt: skip
        prepared = preparation.prepare_case(
            settings, BuiltCase(module, sample, mean_square), self._backend, self._timer, self._cache_bytes
        )
        prepared.facts |= {
            "flops": flops * (3 if train else 1),
            "flops_source": "torch.utils.flop_counter",
            "items": int(first_dimension(sample)),
        }
        return prepared


def first_dimension(sample: Sample) -> int:
    """Return the first dimension of the first tensor: the number of items in a batch."""
    sizes: list[int] = []
    map_tensors((sample.args, sample.kwargs), lambda t: sizes.append(t.shape[0]) if t.dim() else None)
    return sizes[0] if sizes else 1


def _device_state(backend: BaseBackend) -> Message:
    """Return clocks, temperature, power and processes of an NVIDIA card; {} for other devices."""
    if backend.BACKEND_NAME != "nvidia":
        return {}
    return card_state(str(backend.get_device_info(backend.device_id).uuid))


def _count_flops(module: Any, sample: Sample) -> float:
    from torch.utils.flop_counter import FlopCounterMode

    inputs, state = sample.copy(), ModelState(module)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        first_tensor(module.eval()(*inputs.args, **inputs.kwargs))
    state.restore()
    return float(counter.get_total_flops())


def _depth(module: Any) -> tuple[float, float]:
    """Return (longest sum in any layer, number of layers): they limit how far errors add up."""
    rows = [p.numel() // p.shape[0] for p in module.parameters() if p.dim() > 1]
    return float(max(rows, default=1)), float(max(len(rows), 1))


def _cache_bytes(backend: BaseBackend) -> int:
    """Size of the last-level cache, which must not contain the inputs of a cold call."""
    if backend.device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(backend.device)
        return int(getattr(properties, "L2_cache_size", 0)) or 256 << 20
    return host.last_level_cache_bytes()


def _error_message(error: BaseException) -> str:
    if isinstance(error, PolyfleetError):
        return f"{error.message}; {error.remedy}" if error.remedy else error.message
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


class _Watchdog:
    """End this process if its block takes longer than `limit_s` seconds (0: no limit)."""

    def __init__(self, limit_s: float):
        self._timer = threading.Timer(limit_s, os._exit, (TIMED_OUT,)) if limit_s > 0 else None

    def __enter__(self) -> None:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

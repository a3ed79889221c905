"""Run measurements in rounds: in random order on each host, in parallel over hosts, until the results are precise.

A target is one device of the fleet, or of this machine, that opens cases and times blocks on request. Hosts wait for
each other after each round. Every result is logged as soon as it is complete.
"""

import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from orchestrator.benchmark import comparison
from orchestrator.benchmark.suite import BenchmarkRequest, CaseGroup, MeasurementSettings
from workers.benchmark.host import classify
from workers.measurement import statistics

OPEN_S, BLOCK_S, CALL_S = 600.0, 120.0, 60.0
NEEDS_REPEAT, ENDED_PROCESS = "again", "ended its process"
"""Status of a measurement that was lost with another one's process, and of the one that ended that process."""
Data = dict[str, Any]
LineCallback = Callable[[Data], None]
"""Callback that receives each line of the run's log, in any thread."""
MIN_ROUNDS_UNCOMPARED = 15
"""Rounds of a case without a comparison."""


class TargetLost(Exception):
    """The target is lost for the rest of this run; the message is the reason."""


class SessionEnded(Exception):
    """The session's process ended during a call; a new one runs, without open cases. The message is the reason."""


class RunCancelled(Exception):
    """The run was cancelled; the message is the reason."""


class Target(Protocol):
    """A device to measure. `host` is equal for targets on one machine. `call` raises TargetLost or SessionEnded."""

    id: str
    host: str
    facts: Data

    def call(self, message: Data, timeout_s: float) -> Data: ...


@dataclass(slots=True)
class Measurement:
    """One case on one target while it is measured. `rounds` has the replies of its blocks, by round."""

    target: Target
    settings: MeasurementSettings
    facts: Data = field(default_factory=dict)
    rounds: dict[int, Data] = field(default_factory=dict)
    control_rounds: dict[int, Data] = field(default_factory=dict)
    """Blocks of a second measurement in each round: the A/A control, whose difference is the host's noise."""
    problem: str = ""
    status: str = "measured"

    @property
    def id(self) -> str:
        return f"{self.target.id}/{self.settings}"

    @property
    def is_active(self) -> bool:
        return self.status == "measured"

    def stop(self, status: str, problem: str) -> None:
        self.status, self.problem = status, problem


class RoundRunner:
    """Measures the cases of a run. `cancelled` returns "" or the reason to stop early. `done` has finished cases."""

    def __init__(
        self,
        request: BenchmarkRequest,
        targets: Iterable[Target],
        on_line: LineCallback,
        cancelled: Callable[[], str] = lambda: "",
        done: frozenset[str] = frozenset(),
    ):
        self._request, self._targets, self._on_line = request, list(targets), on_line
        self._cancelled, self._done = cancelled, done
        self._lost: dict[str, str] = {}
        self._until_s = time.monotonic() + request.max_minutes * 60

    def run(self, groups: Iterable[CaseGroup]) -> None:
        """Measure all cases. Raises RunCancelled."""
        remaining = [group for group in groups if group.case not in self._done]
        comparisons = sum(len(group.settings) for group in remaining) * max(len(self._targets) - 1, 1)
        minimum = max(self._request.rounds, statistics.minimum_rounds(comparisons))
        for number, group in enumerate(remaining, 1):
            self._check()
            progress = {"line": "progress", "case": group.case, "number": number, "of": len(remaining)}
            if time.monotonic() > self._until_s:
                self._skip(group)
                continue
            self._on_line(progress | {"doing": "opening"})
            crashed: dict[str, str] = {}
            while not self._measure(group, min(minimum, self._request.max_rounds), progress, crashed):
                self._check()

    def _measure(self, group: CaseGroup, minimum: int, progress: Data, crashed: dict[str, str]) -> bool:
        """Measure one case. Return False if it must be repeated because a measurement ended its target's process.

        That measurement is then in `crashed` and left out: rounds of two processes are not one sample.
        """
        measurements = self._new_measurements(group, crashed)
        idle_states = self._states()
        self._on_hosts(measurements, lambda local: self._open(group, local))
        before = self._states(measurements)
        is_quiet = all(_host_class(idle_states.get(target), state) == "quiet" for target, state in before.items())
        number = self._rounds(group, measurements, minimum, progress, is_quiet)
        after = self._states()
        if any(measurement.status == NEEDS_REPEAT for measurement in measurements):
            crashed |= {
                measurement.id: measurement.problem
                for measurement in measurements
                if measurement.status == ENDED_PROCESS
            }
            self._on_hosts(measurements, self._close)
            return False
        self._on_hosts(measurements, self._check_unchanged)
        if self._request.energy:
            self._on_hosts(measurements, self._energy)
        self._on_hosts(measurements, self._close)
        for measurement in measurements:
            self._on_line(
                _result_line(group, measurement, before.get(measurement.target.id), after.get(measurement.target.id))
            )
        self._on_line({"line": "case", "case": group.case, "rounds": number})
        return True

    def _new_measurements(self, group: CaseGroup, crashed: dict[str, str]) -> list[Measurement]:
        measurements = [Measurement(target, settings) for target in self._targets for settings in group.settings]
        for measurement in measurements:
            if measurement.target.id in self._lost:
                measurement.stop("lost", self._lost[measurement.target.id])
            elif measurement.id in crashed:
                measurement.stop(ENDED_PROCESS, crashed[measurement.id])
        return measurements

    def _rounds(
        self, group: CaseGroup, measurements: list[Measurement], minimum: int, progress: Data, is_quiet: bool
    ) -> int:
        """Run rounds until the results are precise or a limit is reached. Return the number of rounds."""
        started_s, number = time.monotonic(), 0
        while any(measurement.is_active for measurement in measurements) and number < self._request.max_rounds:
            if any(measurement.status == NEEDS_REPEAT for measurement in measurements):
                break
            self._check()
            self._round(group, measurements, number)
            number += 1
            self._on_line(progress | {"doing": "measuring", "round": number})
            if number >= minimum and (
                _is_precise(group, measurements, is_quiet) or time.monotonic() - started_s > self._request.case_s
            ):
                break
        return number

    def _open(self, group: CaseGroup, local: list[Measurement]) -> None:
        for measurement in local:
            if not measurement.is_active:
                continue
            case_settings = {
                "case": group.case,
                "precision": measurement.settings.precision,
                "level": measurement.settings.level,
                "regime": measurement.settings.regime,
                "case_s": self._request.case_s,
            }
            case_settings |= {"kernels": measurement.settings.kernels} if measurement.settings.kernels else {}
            measurement.facts = (
                self._call(
                    measurement,
                    {"do": "prepare", "measurement": measurement.id, "case": case_settings, "limit_s": OPEN_S},
                    local,
                )
                or {}
            )
            if "unsupported" in measurement.facts:
                measurement.stop("unsupported", measurement.facts["unsupported"])
            elif "failed" in measurement.facts:
                measurement.stop("failed", measurement.facts["failed"])
            elif measurement.is_active and measurement.facts["accuracy"]["ok"] is False:
                measurement.stop("wrong", measurement.facts["accuracy"]["reason"])

    def _round(self, group: CaseGroup, measurements: list[Measurement], number: int) -> None:
        """Measure each configuration once, in random order, and on each host one of them twice (A/A control)."""

        def on_host(local: list[Measurement]) -> None:
            active = [measurement for measurement in local if measurement.is_active]
            turns = [(measurement, False) for measurement in active] + [
                (measurement, True) for measurement in active[:1]
            ]
            random.Random(  # noqa: S311 - not a secret
                f"{self._request.seed}/{group.case}/{number}/{local[0].target.host}"
            ).shuffle(turns)
            for measurement, is_control in turns:
                if not measurement.is_active:
                    continue
                reply = self._call(measurement, {"do": "run", "measurement": measurement.id, "limit_s": BLOCK_S}, local)
                if reply and "failed" in reply:
                    measurement.stop("failed", reply["failed"])
                elif reply:
                    (measurement.control_rounds if is_control else measurement.rounds)[number] = reply

        self._on_hosts(measurements, on_host)

    def _check_unchanged(self, local: list[Measurement]) -> None:
        """Fail measurements whose later calls changed what they measure: their times are not of one workload."""
        for measurement in local:
            if measurement.is_active:
                message = {"do": "check", "measurement": measurement.id, "limit_s": BLOCK_S}
                if reply := self._call_optional(measurement.target, message):
                    measurement.stop("failed", reply["failed"])

    def _energy(self, local: list[Measurement]) -> None:
        for measurement in local:
            if measurement.is_active and measurement.target.facts.get("counts_energy"):
                measurement.facts["energy"] = (
                    self._call_optional(
                        measurement.target, {"do": "energy", "measurement": measurement.id, "limit_s": BLOCK_S}
                    )
                    or {}
                )

    def _close(self, local: list[Measurement]) -> None:
        for target in {measurement.target.id: measurement.target for measurement in local}.values():
            self._call_optional(target, {"do": "close", "limit_s": CALL_S})

    def _call_optional(self, target: Target, message: Data) -> Data | None:
        """Call a target; return None on failure, which affects no result."""
        if target.id in self._lost:
            return None
        try:
            return target.call(message, message["limit_s"] + CALL_S)
        except TargetLost as e:
            self._lost[target.id] = str(e)
        except SessionEnded:
            return None
        return None

    def _call(self, measurement: Measurement, message: Data, local: list[Measurement]) -> Data | None:
        """Call a target; return None if it or its session is lost, after updating the status of its measurements."""
        try:
            return measurement.target.call(message, message["limit_s"] + CALL_S)
        except TargetLost as e:
            self._lost[measurement.target.id] = str(e)
            for other in local:
                if other.target is measurement.target and other.is_active:
                    other.stop("lost", str(e))
        except SessionEnded as e:
            measurement.stop(ENDED_PROCESS, str(e))
            for other in local:
                if other.target is measurement.target and other.is_active and other.facts:
                    other.stop(NEEDS_REPEAT, "")
        return None

    def _states(self, opened: Iterable[Measurement] = ()) -> dict[str, Data]:
        """Query how busy each target's host and device are.

        If the process with the opened measurements has ended, the last opened one counts as the cause.
        """
        own_pids = [target.facts["pid"] for target in self._targets if "pid" in target.facts]
        message = {"do": "state", "ours": own_pids, "limit_s": CALL_S}
        states: dict[str, Data | None] = {}
        for target in self._targets:
            running = [measurement for measurement in opened if measurement.target is target and measurement.is_active]
            states[target.id] = (
                self._call(running[-1], message, running) if running else self._call_optional(target, message)
            )
        return {name: state for name, state in states.items() if state}

    def _on_hosts(self, measurements: list[Measurement], work: Callable[[list[Measurement]], None]) -> None:
        """Call `work` with the measurements of each host, in parallel, and wait for all."""
        by_host: dict[str, list[Measurement]] = {}
        for measurement in measurements:
            by_host.setdefault(measurement.target.host, []).append(measurement)
        if len(by_host) == 1:
            work(measurements)
            return
        with ThreadPoolExecutor(max(len(by_host), 1), "host") as pool:
            list(pool.map(work, by_host.values()))

    def _skip(self, group: CaseGroup) -> None:
        reason = f"the run's limit of {self._request.max_minutes:g} minutes was reached"
        for measurement in self._skipped(group, reason):
            self._on_line(_result_line(group, measurement, None, None))

    def _skipped(self, group: CaseGroup, reason: str) -> Iterator[Measurement]:
        for target in self._targets:
            for settings in group.settings:
                yield Measurement(target, settings, problem=reason, status="skipped")

    def _check(self) -> None:
        if reason := self._cancelled():
            raise RunCancelled(reason)


def _result_line(group: CaseGroup, measurement: Measurement, before: Data | None, after: Data | None) -> Data:
    """Line of one result, with all samples."""
    status = "failed" if measurement.status == ENDED_PROCESS else measurement.status
    facts = {k: v for k, v in measurement.facts.items() if k not in _FAILURE_KEYS}
    blocks = [{"round": n, **measurement.rounds[n]} for n in sorted(measurement.rounds)]
    control_blocks = [{"round": n, **measurement.control_rounds[n]} for n in sorted(measurement.control_rounds)]
    return {
        "line": "result",
        "id": f"{group.case}@{measurement.id}",
        "target": measurement.target.id,
        "host": measurement.target.host,
        **group.about,
        "precision": measurement.settings.precision,
        "level": measurement.settings.level,
        "regime": measurement.settings.regime,
        **({"kernels": measurement.settings.kernels} if measurement.settings.kernels else {}),
        "status": status,
        "reason": measurement.problem,
        **facts,
        "blocks": blocks,
        "control_blocks": control_blocks,
        "host_before": before,
        "host_after": after,
    }


def _is_precise(group: CaseGroup, measurements: list[Measurement], is_quiet: bool) -> bool:
    """Return whether all comparisons are precise enough."""
    results = [_result_line(group, measurement, None, None) for measurement in measurements if measurement.is_active]
    pairs = [(other, result) for result in results if (other := comparison.find_reference(result, results)) is not None]
    if not pairs:
        return all(len(result["blocks"]) >= MIN_ROUNDS_UNCOMPARED for result in results)
    return all(statistics.is_precise(comparison.compare_results(other, result), is_quiet) for other, result in pairs)


def _host_class(before: Data | None, after: Data) -> str:
    """Class of a host between two states; `shared` if a state is missing."""
    return str(classify(before, after)["class"]) if before and after else "shared"


_FAILURE_KEYS = ("unsupported", "failed")

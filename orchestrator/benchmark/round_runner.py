"""Who is measured when: rounds over all columns of a host in turns, the same round on every host, until it is enough.

A column is one device of the fleet (or of this machine) that opens arms and times blocks when told to. Hosts work side
by side and wait for each other after each round. Every result is told as soon as it is there.
"""

import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from orchestrator.benchmark import comparison
from orchestrator.benchmark.suite import BenchmarkRequest, CaseGroup, MeasurementSettings
from workers.benchmark import statistics
from workers.benchmark.host import classify

OPEN_S, BLOCK_S, CALL_S = 600.0, 120.0, 60.0
AGAIN, ENDED = "again", "ended its process"
"""Of an arm whose process another one ended, and of that other."""
Data = dict[str, Any]
Tell = Callable[[Data], None]
"""Gets each line of the run's log, in any thread."""
LEAST_ALONE = 15
"""Rounds of a case that has nothing to be compared with."""


class TargetLost(Exception):
    """The column is gone for this run; the text is the reason."""


class SessionEnded(Exception):
    """Its process ended amid a call, and a new one is there: what was open is not. The text is why it ended."""


class RunCancelled(Exception):
    """The run is to end now."""


class Target(Protocol):
    """`host` is the same for columns that share a machine. `call` raises TargetLost or SessionEnded."""

    id: str
    host: str
    facts: Data

    def call(self, message: Data, timeout_s: float) -> Data: ...


@dataclass(slots=True)
class Measurement:
    """One cell while it is measured. `rounds` holds the answers of its blocks, by round."""

    column: Target
    way: MeasurementSettings
    facts: Data = field(default_factory=dict)
    rounds: dict[int, Data] = field(default_factory=dict)
    again: dict[int, Data] = field(default_factory=dict)
    """Of the same arm measured a second time in each round: what this host tells apart though it is the same."""
    problem: str = ""
    status: str = "measured"

    @property
    def id(self) -> str:
        return f"{self.column.id}/{self.way}"

    @property
    def alive(self) -> bool:
        return self.status == "measured"

    def stop(self, status: str, problem: str) -> None:
        self.status, self.problem = status, problem


class RoundRunner:
    """`cancelled` answers "" or why the run ends early. `done` has the cases measured before a restart."""

    def __init__(
        self,
        asked: BenchmarkRequest,
        columns: Iterable[Target],
        tell: Tell,
        cancelled: Callable[[], str] = lambda: "",
        done: frozenset[str] = frozenset(),
    ):
        self._asked, self._columns, self._tell = asked, list(columns), tell
        self._cancelled, self._done = cancelled, done
        self._lost: dict[str, str] = {}
        self._until_s = time.monotonic() + asked.max_minutes * 60

    def run(self, groups: Iterable[CaseGroup]) -> None:
        """Raises Cancelled."""
        todo = [group for group in groups if group.case not in self._done]
        comparisons = sum(len(group.ways) for group in todo) * max(len(self._columns) - 1, 1)
        least = max(self._asked.rounds, statistics.minimum_rounds(comparisons))
        for number, group in enumerate(todo, 1):
            self._check()
            progress = {"line": "progress", "case": group.case, "number": number, "of": len(todo)}
            if time.monotonic() > self._until_s:
                self._skip(group)
                continue
            self._tell(progress | {"doing": "opening"})
            ended: dict[str, str] = {}
            while not self._measure(group, min(least, self._asked.max_rounds), progress, ended):
                self._check()

    def _measure(self, group: CaseGroup, least: int, progress: Data, ended: dict[str, str]) -> bool:
        """False where an arm ended the process of others: it is in `ended` now, and the rest is to be measured anew,
        since rounds of two processes are not one sample."""
        arms = self._arms(group, ended)
        resting = self._states()
        self._on_hosts(arms, lambda mine: self._open(group, mine))
        before = self._states(arms)
        quiet = all(_class(resting.get(column), state) == "quiet" for column, state in before.items())
        number = self._rounds(group, arms, least, progress, quiet)
        after = self._states()
        if any(arm.status == AGAIN for arm in arms):
            ended |= {arm.id: arm.problem for arm in arms if arm.status == ENDED}
            self._on_hosts(arms, self._close)
            return False
        if self._asked.energy:
            self._on_hosts(arms, self._energy)
        self._on_hosts(arms, self._close)
        for arm in arms:
            self._tell(_cell(group, arm, before.get(arm.column.id), after.get(arm.column.id)))
        self._tell({"line": "case", "case": group.case, "rounds": number})
        return True

    def _arms(self, group: CaseGroup, ended: dict[str, str]) -> list[Measurement]:
        arms = [Measurement(column, way) for column in self._columns for way in group.ways]
        for arm in arms:
            if arm.column.id in self._lost:
                arm.stop("lost", self._lost[arm.column.id])
            elif arm.id in ended:
                arm.stop(ENDED, ended[arm.id])
        return arms

    def _rounds(self, group: CaseGroup, arms: list[Measurement], least: int, progress: Data, quiet: bool) -> int:
        """How many it took."""
        begun, number = time.monotonic(), 0
        while any(arm.alive for arm in arms) and number < self._asked.max_rounds:
            if any(arm.status == AGAIN for arm in arms):
                break
            self._check()
            self._round(group, arms, number)
            number += 1
            self._tell(progress | {"doing": "measuring", "round": number})
            if number >= least and (_settled(group, arms, quiet) or time.monotonic() - begun > self._asked.case_s):
                break
        return number

    def _open(self, group: CaseGroup, mine: list[Measurement]) -> None:
        for arm in mine:
            if not arm.alive:
                continue
            cell = {
                "case": group.case,
                "precision": arm.way.precision,
                "level": arm.way.level,
                "regime": arm.way.regime,
                "case_s": self._asked.case_s,
            }
            cell |= {"kernels": arm.way.kernels} if arm.way.kernels else {}
            arm.facts = self._call(arm, {"do": "open", "arm": arm.id, "cell": cell, "limit_s": OPEN_S}, mine) or {}
            if "unsupported" in arm.facts:
                arm.stop("unsupported", arm.facts["unsupported"])
            elif "failed" in arm.facts:
                arm.stop("failed", arm.facts["failed"])
            elif arm.alive and arm.facts["accuracy"]["ok"] is False:
                arm.stop("wrong", arm.facts["accuracy"]["reason"])

    def _round(self, group: CaseGroup, arms: list[Measurement], number: int) -> None:
        """Each arm once, in an order of chance; on each host one arm a second time."""

        def on_host(mine: list[Measurement]) -> None:
            alive = [arm for arm in mine if arm.alive]
            turns = [(arm, False) for arm in alive] + [(arm, True) for arm in alive[:1]]
            random.Random(  # noqa: S311 - chance, no secret
                f"{self._asked.seed}/{group.case}/{number}/{mine[0].column.host}"
            ).shuffle(turns)
            for arm, again in turns:
                if not arm.alive:
                    continue
                told = self._call(arm, {"do": "block", "arm": arm.id, "limit_s": BLOCK_S}, mine)
                if told and "failed" in told:
                    arm.stop("failed", told["failed"])
                elif told:
                    (arm.again if again else arm.rounds)[number] = told

        self._on_hosts(arms, on_host)

    def _energy(self, mine: list[Measurement]) -> None:
        for arm in mine:
            if arm.alive and arm.column.facts.get("counts_energy"):
                arm.facts["energy"] = self._aside(arm.column, {"do": "energy", "arm": arm.id, "limit_s": BLOCK_S}) or {}

    def _close(self, mine: list[Measurement]) -> None:
        for column in {arm.column.id: arm.column for arm in mine}.values():
            self._aside(column, {"do": "close", "limit_s": CALL_S})

    def _aside(self, column: Target, message: Data) -> Data | None:
        """An answer that no cell stands or falls with."""
        if column.id in self._lost:
            return None
        try:
            return column.call(message, message["limit_s"] + CALL_S)
        except TargetLost as e:
            self._lost[column.id] = str(e)
        except SessionEnded:
            return None
        return None

    def _call(self, arm: Measurement, message: Data, mine: list[Measurement]) -> Data | None:
        """None where the column or its session is gone; what that means for each of its arms is noted."""
        try:
            return arm.column.call(message, message["limit_s"] + CALL_S)
        except TargetLost as e:
            self._lost[arm.column.id] = str(e)
            for other in mine:
                if other.column is arm.column and other.alive:
                    other.stop("lost", str(e))
        except SessionEnded as e:
            arm.stop(ENDED, str(e))
            for other in mine:
                if other.column is arm.column and other.alive and other.facts:
                    other.stop(AGAIN, "")
        return None

    def _states(self, opened: Iterable[Measurement] = ()) -> dict[str, Data]:
        """Of every column: how busy its host and its device are now. Where the process has ended that holds its opened
        arms, the last of them has ended it."""
        ours = [column.facts["pid"] for column in self._columns if "pid" in column.facts]
        wanted = {"do": "state", "ours": ours, "limit_s": CALL_S}
        told: dict[str, Data | None] = {}
        for column in self._columns:
            mine = [arm for arm in opened if arm.column is column and arm.alive]
            told[column.id] = self._call(mine[-1], wanted, mine) if mine else self._aside(column, wanted)
        return {name: state for name, state in told.items() if state}

    def _on_hosts(self, arms: list[Measurement], work: Callable[[list[Measurement]], None]) -> None:
        """`work` for the arms of each host, hosts side by side; returns when all have ended."""
        by_host: dict[str, list[Measurement]] = {}
        for arm in arms:
            by_host.setdefault(arm.column.host, []).append(arm)
        if len(by_host) == 1:
            work(arms)
            return
        with ThreadPoolExecutor(max(len(by_host), 1), "host") as pool:
            list(pool.map(work, by_host.values()))

    def _skip(self, group: CaseGroup) -> None:
        reason = f"the run's {self._asked.max_minutes:g} minutes were over"
        for arm in self._skipped(group, reason):
            self._tell(_cell(group, arm, None, None))

    def _skipped(self, group: CaseGroup, reason: str) -> Iterator[Measurement]:
        for column in self._columns:
            for way in group.ways:
                yield Measurement(column, way, problem=reason, status="skipped")

    def _check(self) -> None:
        if reason := self._cancelled():
            raise RunCancelled(reason)


def _cell(group: CaseGroup, arm: Measurement, before: Data | None, after: Data | None) -> Data:
    """The line of one cell, with all that was measured."""
    status = "failed" if arm.status == ENDED else arm.status
    facts = {k: v for k, v in arm.facts.items() if k not in _TOLD}
    blocks = [{"round": n, **arm.rounds[n]} for n in sorted(arm.rounds)]
    again = [{"round": n, **arm.again[n]} for n in sorted(arm.again)]
    return {
        "line": "cell", "id": f"{group.case}@{arm.id}", "column": arm.column.id, "host": arm.column.host,
        **group.about, "precision": arm.way.precision, "level": arm.way.level, "regime": arm.way.regime,
        **({"kernels": arm.way.kernels} if arm.way.kernels else {}), "status": status, "reason": arm.problem, **facts,
        "blocks": blocks, "blocks_again": again, "host_before": before, "host_after": after,
    }  # fmt: skip


def _settled(group: CaseGroup, arms: list[Measurement], quiet: bool) -> bool:
    """Whether no comparison would become clearer."""
    cells = [_cell(group, arm, None, None) for arm in arms if arm.alive]
    pairs = [(other, cell) for cell in cells if (other := comparison.find_reference(cell, cells)) is not None]
    if not pairs:
        return all(len(cell["blocks"]) >= LEAST_ALONE for cell in cells)
    return all(statistics.is_precise(comparison.compare_results(other, cell), quiet) for other, cell in pairs)


def _class(before: Data | None, after: Data) -> str:
    """Of a host between two states; a host that did not tell one may be anything."""
    return str(classify(before, after)["class"]) if before and after else "shared"


_TOLD = ("unsupported", "failed")

"""Turns: interleaved on a host, together over hosts, to the end of a case; and what happens when one ends early."""

import threading

import pytest
from patience import LIMIT_S

from orchestrator.benchmark import suite
from orchestrator.benchmark.results import summarize
from orchestrator.benchmark.round_runner import RoundRunner, RunCancelled, SessionEnded, TargetLost
from workers.benchmark import host


class Scripted:
    """A column whose blocks take `call_s`; `trouble` maps (verb, number of that call) to what happens instead."""

    def __init__(self, name, host="h", call_s=1e-3, facts=None, trouble=None, log=None):
        self.id, self.host, self.facts = name, host, {"kind": name}
        self.call_s, self.opened, self.trouble = call_s, facts or {}, trouble or {}
        self.log = log if log is not None else []
        self.counts = {}
        self.meets = lambda verb: None

    def call(self, message, timeout_s):
        verb = message["do"]
        self.counts[verb] = self.counts.get(verb, 0) + 1
        self.log.append((self.id, verb, message.get("measurement", "")))
        self.meets(verb)
        happens = self.trouble.get((verb, self.counts[verb]))
        if isinstance(happens, Exception):
            raise happens
        if happens is not None:
            return happens
        if verb == "prepare":
            return {"accuracy": {"ok": True, "reason": ""}} | self.opened
        if verb == "run":
            return {
                "calls": 1,
                "parts_s": [self.call_s],
                "cpu_s": 0.0,
                "preempted": 0,
                "single_call_s": self.call_s,
                "at": 0.0,
            }
        return self.quiet() if verb == "state" else {}

    def quiet(self):
        """This host as it is when nothing else runs on it: what its verdicts are must not depend on who else does."""
        idle = {"total": float(self.counts["state"]), "busy": 0.0, "steal": 0.0}
        return host.state() | {"pressure_cpu": 0.0, "pressure_memory": 0.0, "cpu_times": idle}


def conduct(columns, cancelled=lambda: "", done=frozenset(), **asked):
    request = suite.request({"cases": ["rmsnorm"], "max_rounds": 12} | asked)
    lines = []
    RoundRunner(request, columns, lines.append, cancelled, done).run(suite.groups(request))
    return [line for line in lines if line["line"] != "progress"]


def cells(lines):
    return {line["target"]: line for line in lines if line["line"] == "result"}


def test_every_round_has_each_arm_once_and_one_twice_in_an_order_of_chance():
    log = []
    lines = conduct([Scripted("a", log=log), Scripted("b", log=log)])
    turns = [column for column, verb, *_ in log if verb == "run"]
    by_round = [turns[i : i + 3] for i in range(0, len(turns), 3)]
    assert all(sorted(turn) == ["a", "a", "b"] for turn in by_round)
    assert len({tuple(turn) for turn in by_round}) > 1
    assert {len(cell["blocks"]) for cell in cells(lines).values()} == {len(by_round)}
    assert len(cells(lines)["a"]["control_blocks"]) == len(by_round)


def test_a_result_whose_later_calls_changed_their_inputs_is_failed_with_the_reason():
    reason = "a later call changed input[0], so the timed calls computed different results"
    lines = cells(conduct([Scripted("a"), Scripted("b", trouble={("check", 1): {"failed": reason}})]))
    assert (lines["a"]["status"], lines["b"]["status"], lines["b"]["reason"]) == ("measured", "failed", reason)


def test_hosts_measure_side_by_side_and_in_the_same_round():
    log, together = [], threading.Barrier(2)
    a, b = Scripted("a", "one", log=log), Scripted("b", "two", log=log)
    a.meets = b.meets = lambda verb: verb == "prepare" and together.wait(LIMIT_S)  # only side by side both get past
    conduct([a, b])
    counts = {"a": 0, "b": 0}
    for column in [column for column, verb, *_ in log if verb == "run"]:
        counts[column] += 1  # each host has two blocks a round: nobody is ever more than a round ahead
        assert abs(counts["a"] - counts["b"]) <= 2


def test_a_case_ends_when_its_intervals_are_narrow_and_not_before_enough_rounds():
    lines = conduct([Scripted("a"), Scripted("b", call_s=2e-3)], max_rounds=100)
    assert len(cells(lines)["a"]["blocks"]) == 9
    told = {cell["target"]: cell for cell in summarize(lines)["results"]}
    assert told["b"]["versus"]["verdict"] == "SLOWER"
    assert told["b"]["versus"]["ratio"] == pytest.approx(0.5)


def test_what_a_device_cannot_do_is_said_and_not_measured():
    told = cells(conduct([Scripted("a"), Scripted("b", facts={"unsupported": "b has no native float16"})]))
    assert (told["b"]["status"], told["b"]["reason"]) == ("unsupported", "b has no native float16")
    assert told["b"]["blocks"] == [] and told["a"]["status"] == "measured"


def test_a_wrong_result_gets_no_time():
    wrong = {"accuracy": {"ok": False, "reason": "errors beyond the tolerance of its dtype"}}
    told = cells(conduct([Scripted("a"), Scripted("b", facts=wrong)]))
    assert (told["b"]["status"], told["b"]["blocks"]) == ("wrong", [])


def test_a_failure_amid_rounds_ends_that_cell_alone():
    told = cells(conduct([Scripted("a"), Scripted("b", trouble={("run", 4): {"failed": "RuntimeError: NaN"}})]))
    assert (told["b"]["status"], told["b"]["reason"]) == ("failed", "RuntimeError: NaN")
    assert told["a"]["status"] == "measured" and len(told["a"]["blocks"]) >= 9


def test_a_session_that_dies_costs_its_cell_and_the_next_case_goes_on():
    column = Scripted("b", trouble={("run", 2): SessionEnded("killed by signal 9: out of memory perhaps")})
    lines = conduct([Scripted("a"), column], cases=["rmsnorm", "softmax"])
    told = [line for line in lines if line["line"] == "result" and line["target"] == "b"]
    assert [cell["status"] for cell in told] == ["failed", "measured"]
    assert "out of memory" in told[0]["reason"]


def test_a_session_that_dies_between_opening_and_rounds_costs_the_case_it_opened_last():
    class Dies(Scripted):
        def call(self, message, timeout_s):
            last = self.log[-1:]
            if message["do"] == "state" and last and last[0][1] == "prepare" and "bf16" in last[0][2]:
                raise SessionEnded("killed by signal 11")
            return super().call(message, timeout_s)

    lines = conduct([Scripted("a"), Dies("b")], precisions=["fp32", "bf16"])
    told = {(line["target"], line["precision"]): line for line in lines if line["line"] == "result"}
    assert (told["b", "bf16"]["status"], told["b", "bf16"]["reason"]) == ("failed", "killed by signal 11")
    assert told["b", "bf16"]["blocks"] == []
    assert {cell["status"] for key, cell in told.items() if key != ("b", "bf16")} == {"measured"}


def test_a_lost_column_is_lost_for_the_run_and_the_others_go_on():
    column = Scripted("b", trouble={("run", 2): TargetLost("its node is lost: Ray marked the node dead")})
    lines = conduct([Scripted("a"), column], cases=["rmsnorm", "softmax"])
    told = [line for line in lines if line["line"] == "result" and line["target"] == "b"]
    assert [cell["status"] for cell in told] == ["lost", "lost"]
    assert sum(verb == "run" for _, verb, *_ in column.log) == 2
    assert [c["status"] for c in cells(lines).values() if c["target"] == "a"] == ["measured"]


def test_cancelling_ends_it_between_rounds_and_keeps_what_was_told():
    answers = iter(["", "", "cancelled by the user"] + [""] * 100)
    with pytest.raises(RunCancelled, match="by the user"):
        conduct([Scripted("a")], cancelled=lambda: next(answers))


def test_a_run_that_is_taken_up_again_skips_what_it_has():
    lines = conduct([Scripted("a")], cases=["rmsnorm", "softmax"])
    done = frozenset(line["case"] for line in lines if line["line"] == "case")
    assert conduct([Scripted("a")], cases=["rmsnorm", "softmax"], done=done) == []
    rest = conduct([Scripted("a")], cases=["rmsnorm", "softmax"], done=frozenset(list(done)[:1]))
    assert len([line for line in rest if line["line"] == "result"]) == 1


def test_after_the_run_s_minutes_no_case_begins():
    told = cells(conduct([Scripted("a")], max_minutes=1e-9))
    assert told["a"]["status"] == "skipped" and "minutes was reached" in told["a"]["reason"]


def test_what_shared_a_process_with_a_case_that_ended_it_is_measured_anew():
    class Dies(Scripted):
        """Ends its process in the third block of bf16."""

        def call(self, message, timeout_s):
            told = super().call(message, timeout_s)
            if message["do"] == "run" and "bf16" in message["measurement"] and self.counts["run"] > 5:
                raise SessionEnded("a segmentation fault")
            return told

    lines = conduct([Scripted("a"), Dies("b")], precisions=["fp32", "bf16"])
    told = {(line["target"], line["precision"]): line for line in lines if line["line"] == "result"}
    assert (told["b", "bf16"]["status"], told["b", "bf16"]["reason"]) == ("failed", "a segmentation fault")
    rest = [told[key] for key in told if key != ("b", "bf16")]
    assert [cell["status"] for cell in rest] == ["measured"] * 3
    assert [b["round"] for b in rest[-1]["blocks"]] == list(range(len(rest[0]["blocks"])))


def test_an_interval_of_three_percent_is_enough_on_a_shared_host_and_not_on_a_quiet_one(monkeypatch):
    class Noisy(Scripted):
        def quiet(self):
            return host.state()

        def call(self, message, timeout_s):
            told = super().call(message, timeout_s)
            if message["do"] == "run":
                told["parts_s"] = [self.call_s * (1 + 0.04 * (self.counts["run"] % 3))]
            return told

    def rounds_when(pressure):
        times = {"total": 100.0, "busy": 50.0, "steal": 0.0}
        busy = {"pressure_cpu": pressure, "cpu_times": times, "load_1min": 0.0, "cpus": 2}
        monkeypatch.setattr(host, "state", lambda: busy)
        return len(cells(conduct([Noisy("a"), Noisy("b", call_s=2e-3)], max_rounds=40))["a"]["blocks"])

    assert rounds_when(50.0) < rounds_when(0.0)


def test_a_session_that_ends_after_the_last_round_takes_nothing_back():
    told = cells(conduct([Scripted("a"), Scripted("b", trouble={("close", 1): SessionEnded("killed by signal 9")})]))
    assert [cell["status"] for cell in told.values()] == ["measured", "measured"]

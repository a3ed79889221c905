"""Runs over time: what changed, what a gate says, where a series settled; and what other tools read."""

import json
import random

import pytest

from cluster.errors import NotFound, UserError
from orchestrator.benchmark import baselines, export, history
from orchestrator.show.benchmark import compared as shown


def run(name, seconds=1e-3, status="measured", torch="2.13.0", case="softmax/256x4096", busy=False, seed=0):
    """A run of one case in which every round is within 1 %."""
    chance = random.Random(seed)
    blocks = [
        {"round": n, "calls": 5, "parts_s": [5 * seconds * chance.uniform(0.995, 1.005)], "cpu_s": 0.0, "preempted": 0,
         "single_call_s": seconds, "at": float(n)}
        for n in range(15)
    ] if status == "measured" else []  # fmt: skip
    times = {"total": 100.0, "busy": 1.0, "steal": 0.0}
    state = {"pressure_cpu": 50.0 if busy else 0.0, "cpu_times": times, "load_1min": 0.0, "cpus": 2}
    facts = {"kind": "cpu", "pool": "cpu", "torch": torch, "versions": {"ray": "2.60.0"}, "threads": 2}
    return [
        {"line": "started", "run": name, "request": {}, "targets": [], "time": 1.0},
        {"line": "target", "target": "cpu", "host": "h", "facts": facts},
        {"line": "result", "id": f"{case}@cpu/fp32/O1", "case": case, "workload": "softmax", "family": "operation",
         "item": "call", "items": 1, "flops": 1e6, "target": "cpu", "host": "h", "precision": "fp32", "level": "O1",
         "regime": "hot", "mode": "forward", "status": status, "reason": "" if status == "measured" else "too far off",
         "accuracy": {"ok": True}, "blocks": blocks, "control_blocks": blocks, "host_before": state,
         "host_after": state | {"cpu_times": times | {"total": 200.0}}},
        {"line": "ended", "state": "SUCCEEDED", "reason": "", "time": 9.0},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("after", "code", "verdict"),
    [
        (run("b", seed=1), 0, "SAME"),
        (run("b", 0.8e-3, seed=1), 0, "FASTER"),
        (run("b", 1.2e-3, seed=1), 1, "SLOWER"),
        (run("b", status="wrong"), 2, ""),
        (run("b", 1.2e-3, busy=True, seed=1), 3, "INCONCLUSIVE"),
        (run("b", case="softmax/other"), 3, None),
    ],
    ids=["same", "faster", "slower", "wrong", "shared", "nothing in common"],
)
def test_a_gate_says_the_worst_of_all_cells_and_a_busy_host_proves_nothing(after, code, verdict):
    told = history.compare(run("a"), after)
    assert history.gate(told) == code
    assert [row["verdict"] for row in told["results"]] == ([] if verdict is None else [verdict])


def test_a_busy_host_is_believed_on_request_and_said_to_be_one():
    after = run("b", 1.2e-3, busy=True, seed=1)
    assert "not quiet" in history.compare(run("a"), after)["results"][0]["note"]
    assert history.gate(history.compare(run("a"), after, allow_busy_host=True)) == 1


def test_what_else_changed_is_told():
    told = history.compare(run("a", torch="2.8.0"), run("b", seed=1))
    assert told["environment"] == [{"kind": "cpu", "what": "torch", "before": "2.8.0", "after": "2.13.0"}]
    assert "cpu: torch was 2.8.0, is 2.13.0" in shown(told).html()


def test_a_baseline_is_the_newest_of_the_same_kind_and_software_else_the_newest_of_the_kind():
    named = [run("old", torch="2.8.0"), run("first"), run("newest", torch="2.14.0")]
    assert baselines.choose(named, run("b"))[0]["run"] == "first"
    assert baselines.choose(named, run("b", torch="2.8.0"))[0]["run"] == "old"
    assert baselines.choose(named, run("b", torch="2.99.0"))[0]["run"] == "newest"
    assert history.gate(history.compare(baselines.choose(named, run("b", seed=1)), run("b", seed=1))) == 0


def test_each_kind_has_a_baseline_of_its_own_and_a_kind_without_one_says_so():
    def of(kind, lines):
        return [
            line | {"facts": line["facts"] | {"kind": kind}} if line["line"] == "target" else line for line in lines
        ]

    def also(kind, lines):
        more = [line | {"target": kind} for line in of(kind, lines) if line["line"] in ("target", "result")]
        return [*lines[:-1], *(m | ({"id": f"{m['id']}-{kind}"} if "id" in m else {}) for m in more), lines[-1]]

    both = also("nvidia:H200", run("both", seed=1))
    chosen = baselines.choose([also("nvidia:H200", run("a")), run("b", 2e-3)], both)
    assert chosen[0]["run"] == "b, a"
    told = {row["kind"]: row["verdict"] for row in history.compare(chosen, both)["results"]}
    assert told == {"cpu": "FASTER", "nvidia:H200": "SAME"}
    with pytest.raises(NotFound, match="no baseline of amd:MI300X"):
        baselines.choose([run("a")], of("amd:MI300X", run("b")))


def test_a_step_is_found_where_a_series_settles_and_noise_or_one_outlier_is_none():
    chance = random.Random(3)
    level = [1.0 * chance.uniform(0.98, 1.02) for _ in range(12)]
    assert history.steps(level) == []
    assert history.steps([*level[:6], 1.5, *level[6:]]) == []
    [step] = history.steps([*level[:8], *(value * 1.25 for value in level[8:])])
    assert step["at"] == 8 and step["ratio"] == pytest.approx(0.8, rel=0.05)
    assert [s["at"] for s in history.steps([1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 1, 1])] == [4, 8]
    assert history.steps([1.0, 2.0]) == []


def test_a_series_joins_runs_by_case_way_and_kind():
    runs = [run(f"r{n}", 1e-3 if n < 4 else 2e-3, seed=n) for n in range(8)]
    [one] = history.series(runs, "softmax")
    assert (one["kind"], len(one["points"])) == ("cpu", 8)
    assert [(s["at"], round(s["ratio"], 1)) for s in one["steps"]] == [(4, 0.5)]


def by_kernels(lines, name):
    """The same run, as an implementation of kernels would have given it."""
    return [
        line | {"id": f"{line['id']}/{name}", "kernels": name} if line["line"] == "result" else line for line in lines
    ]


def test_kernels_are_series_of_their_own_and_keys_without_them_are_as_ever():
    [plain] = history.series([run("a")], "softmax")
    assert "kernels" not in plain
    assert history.key(run("a")[2], {"cpu": {"kind": "cpu"}}) == ("softmax/256x4096", "fp32", "O1", "hot", "", "cpu")
    told = history.compare(run("a"), by_kernels(run("b"), "triton"))
    assert (told["results"], told["only_before"]) == ([], ["softmax/256x4096 fp32 O1 hot cpu"])
    assert told["only_after"] == ["softmax/256x4096 fp32 O1 hot triton cpu"]
    [row] = history.compare(by_kernels(run("a"), "triton"), by_kernels(run("b", 2e-3, seed=1), "triton"))["results"]
    assert (row["kernels"], row["verdict"]) == ("triton", "SLOWER")
    assert {one["kernels"] for one in history.series([by_kernels(run("a"), "triton")], "softmax")} == {"triton"}


def test_other_tools_tell_kernels_apart():
    lines = by_kernels(run("a"), "triton")
    [one] = json.loads(export.to_pytest_benchmark(lines))["benchmarks"]
    assert one["params"]["kernels"] == "triton" and one["name"].endswith("/fp32/O1/triton")
    assert "softmax/256x4096.time_fp32_O1_hot_triton" in json.loads(export.to_asv(lines))["results"]


def test_pytest_benchmark_and_asv_get_what_they_read():
    told = json.loads(export.to_pytest_benchmark(run("a")))
    [one] = told["benchmarks"]
    assert one["stats"]["rounds"] == 15 and one["stats"]["median"] == pytest.approx(1e-3, rel=0.01)
    assert {"min", "max", "mean", "stddev", "iqr", "ops", "data", "iterations"} <= set(one["stats"])
    asv = json.loads(export.to_asv(run("a")))
    [(name, row)] = asv["results"].items()
    assert (name, asv["version"]) == ("softmax/256x4096.time_fp32_O1_hot", 2)
    assert row[0] == [pytest.approx(1e-3, rel=0.01)] and len(row) == len(asv["result_columns"])


def test_parquet_has_a_row_per_block_or_says_what_to_install():
    try:
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        with pytest.raises(UserError, match="Parquet needs pyarrow"):
            export.to_parquet(run("a"))
        return
    import io

    table = pq.read_table(io.BytesIO(export.to_parquet(run("a"))))
    assert table.num_rows == 15 and table.column("case")[0].as_py() == "softmax/256x4096"

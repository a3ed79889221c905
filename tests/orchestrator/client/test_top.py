"""What `top` makes of nodes and jobs as the server tells them: pure, data in and the whole answer compared."""

from rich.console import Console

from orchestrator.client.top import StepRates, snapshot
from orchestrator.show.top import bar, top

GIB = 1 << 30


def at(second):
    return f"2026-11-20T23:14:{second:06.3f}+00:00"


def device(index, job=None, **more):
    return {
        "backend": "nvidia", "kind": "nvidia:H100-80GB", "index": index, "name": "H100", "emulated": False,
        "total_memory_bytes": 80 * GIB, "free_memory_bytes": 79 * GIB, "allocated_to": job,
    } | more  # fmt: skip


def node(name, *devices, **more):
    return {
        "node": name, "state": "ready", "reason": "", "pool": "p", "load_1min": 3.0, "cpu_count": 4,
        "memory_total_bytes": 16 * GIB, "memory_free_bytes": 4 * GIB, "devices": list(devices), "use": [],
    } | more  # fmt: skip


def job(name, state="RUNNING", step=None, **more):
    return {
        "id": name, "state": state, "kind": "cpu", "pool": "p", "nodes": ["n"], "submitted_at": at(1),
        "started_at": at(10), "resumed_step": None, "metrics": {} if step is None else {"step": step, "loss": 1.5},
        "reason": "started", "attempts": [{"started_at": at(10)}],
    } | more  # fmt: skip


USE = {"backend": "nvidia", "index": 0, "busy_percent": 87.0, "used_memory_bytes": 60 * GIB, "power_w": 412.3,
       "temperature_c": 66.0}  # fmt: skip


def test_a_device_is_told_with_what_its_driver_says_of_it():
    told = snapshot([node("n", device(0, "it"), device(1), use=[USE])], [], StepRates(), at(20))
    first, second = told["nodes"][0]["devices"]
    assert first == {
        "kind": "nvidia:H100-80GB", "index": 0, "name": "H100", "job": "it", "busy_percent": 87.0,
        "used_memory_bytes": 60 * GIB, "total_memory_bytes": 80 * GIB, "power_w": 412.3, "temperature_c": 66.0,
    }  # fmt: skip
    assert (second["busy_percent"], second["used_memory_bytes"]) == (None, GIB)


def test_a_cpu_is_as_busy_as_its_node_and_has_its_memory():
    cpu = device(0, backend="cpu", kind="cpu", total_memory_bytes=16 * GIB, free_memory_bytes=16 * GIB)
    (told,) = snapshot([node("n", cpu)], [], StepRates(), at(20))["nodes"]
    (found,) = told["devices"]
    assert (found["busy_percent"], found["used_memory_bytes"]) == (75.0, 12 * GIB)
    assert (told["load_1min"], told["cpu_count"], told["used_memory_bytes"]) == (3.0, 4, 12 * GIB)


def test_a_node_that_told_nothing_yet_has_a_line():
    unknown = dict.fromkeys(("load_1min", "cpu_count", "memory_total_bytes", "memory_free_bytes"))
    lost = node("gone", pool="", state="lost", reason="no answer", **unknown)
    (told,) = snapshot([lost], [], StepRates(), at(20))["nodes"]
    assert (told["pool"], told["load_1min"], told["used_memory_bytes"], told["devices"]) == ("", None, None, [])
    assert "gone lost: no answer" in lines(top(snapshot([lost], [], StepRates(), at(20))))[3]


def rate_of(rates, told_at, **more):
    (told,) = snapshot([], [job("it", **more)], rates, told_at)["jobs"]
    return told["steps_per_s"]


def test_a_rate_is_over_what_was_seen_lately_and_before_that_over_the_attempt():
    rates = StepRates()
    assert rate_of(rates, at(20), step=30) == 3.0
    assert rate_of(rates, at(22), step=40) == 5.0
    assert rate_of(rates, at(24), step=40) == 2.5
    assert rate_of(rates, at(54), step=100) == 2.0  # of half a minute


def test_a_rate_counts_from_the_step_an_attempt_began_with_and_anew_with_another():
    rates = StepRates()
    assert rate_of(rates, at(20), step=30, resumed_step=20) == 1.0
    assert rate_of(rates, at(22), step=6) == 0.5


def test_who_reports_no_step_or_does_not_run_has_no_rate():
    rates = StepRates()
    assert rate_of(rates, at(20)) is None
    assert rate_of(rates, at(20), step=3, attempts=[]) is None
    assert rate_of(rates, at(20), step=3, state="RECOVERING") is None
    assert rate_of(rates, at(20), metrics={"step": "many"}) is None


def test_jobs_that_hold_devices_come_first_and_why_is_told_of_those_that_wait():
    jobs = [
        job("waits", "PENDING", started_at=None, attempts=[], reason="2 free, 4 wanted"),
        job("new", submitted_at=at(3)),
        job("old"),
        job("starts", "STARTING", reason="unpacking"),
    ]
    told = snapshot([], jobs, StepRates(), at(20))["jobs"]
    assert [(j["id"], j["reason"], j["ran_s"]) for j in told] == [
        ("starts", "unpacking", 10.0), ("old", "", 10.0), ("new", "", 10.0), ("waits", "2 free, 4 wanted", None),
    ]  # fmt: skip


def lines(shown):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(shown)
    return [" ".join(line.split()) for line in capture.get().splitlines()]


PROGRESS = {"step": 20, "of": 620, "steps_per_s": 2.0, "left_s": 300.0, "left_from": "reported", "left": "5 min"}


def test_how_long_is_left_is_told_unless_it_is_a_guess():
    guess = PROGRESS | {"left_from": "attained"}
    jobs = [job("a", progress=PROGRESS), job("b", progress=guess), job("c", progress=None), job("d")]
    assert [told["left_s"] for told in snapshot([], jobs, StepRates(), at(20))["jobs"]] == [300.0, None, None, None]


def test_it_is_drawn_as_devices_and_jobs_without_columns_of_nothing():
    cpu = device(0, backend="cpu", kind="cpu")
    seen = snapshot(
        [node("a", device(0, "it"), device(1), use=[USE]), node("b", cpu)],
        [job("it", step=20, progress=PROGRESS)],
        StepRates(),
        at(20),
    )
    assert lines(top(seen)) == [
        "23:14:20 UTC 2 nodes, 1 of 3 devices in use jobs: 1 RUNNING",
        "",
        "POOL NODE LOAD RAM DEVICE KIND BUSY MEMORY POWER HEAT JOB",
        "p a 3.0/4 12.0 GiB / 16.0 GiB 0 nvidia:H100-80GB █████████· 87 % 60.0 GiB / 80.0 GiB 412 W 66 °C it",
        "1 nvidia:H100-80GB 1.0 GiB / 80.0 GiB",
        "p b 3.0/4 12.0 GiB / 16.0 GiB 0 cpu ████████·· 75 % 12.0 GiB / 16.0 GiB",
        "",
        "JOB STATE KIND NODES RAN STEP RATE LEFT WHY",
        "it RUNNING cpu n 10 s 20 2 steps/s 5 min 0 s",
    ]


def test_nothing_at_all_says_what_to_do():
    assert lines(top(snapshot([], [], StepRates(), at(20)))) == [
        "23:14:20 UTC 0 nodes, 0 of 0 devices in use jobs: none running or waiting",
        *("", "no nodes; run `polyfleet up` to start a fleet", "", "no job is running or waiting"),
    ]


def test_many_jobs_are_cut_and_counted():
    seen = snapshot([], [job(f"j{n:03}", "PENDING", started_at=None) for n in range(200)], StepRates(), at(20))
    assert lines(top(seen))[0].endswith("jobs: 200+ PENDING")
    assert lines(top(seen))[-1] == "and 170 more; run `polyfleet jobs` to see all"


def test_a_bar_is_as_long_as_its_number():
    assert [bar(p) for p in (None, 0.0, 4.0, 55.0, 100.0, 140.0)] == [
        "", "··········   0 %", "··········   4 %", "██████····  55 %", "██████████ 100 %", "██████████ 140 %",
    ]  # fmt: skip

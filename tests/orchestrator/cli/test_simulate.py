"""`polyfleet simulate` as a process: one JSON object, pictures, and nothing written where the input is bad."""

import json
import re
from pathlib import Path

import pytest

from cluster.errors import UserError
from orchestrator.cli.measurement.simulate import POLICIES as TOLD
from orchestrator.cli.measurement.simulate import simulate
from orchestrator.core.jobs.fold import placed, submitted
from orchestrator.core.model import Candidate, Event, Job, Start
from orchestrator.core.plan.policies.priced_policies import DEFAULT, POLICIES
from orchestrator.store.events.event_store import EventStore

pytestmark = pytest.mark.full

EXAMPLE = Path(__file__).parents[3] / "examples" / "simulate"
GIVEN = (
    *("simulate", "--trace", str(EXAMPLE / "trace.csv"), "--throughputs", str(EXAMPLE / "throughputs.csv")),
    *("--fleet", "v100=4,t4=4"),
)
KEYS = [
    *("jobs", "policy", "mean_jct_h", "p50_jct_h", "p99_jct_h", "isolated_mean_h", "makespan_h", "utilisation"),
    *("restarts", "worst_finish_time_ratio", "planning_cpu_ms", "events_per_s"),
]
WINDOW = ["window_mean_jct_h", "window_p50_jct_h", "window_p99_jct_h", "window_isolated_mean_h"]


def test_the_answer_is_one_json_object_and_the_pictures_are_files(polyfleet, tmp_path):
    more = ("--window", "10:50", "--restart-cost", "60", "--noise", "0.5", "--plots", "made/plots", "-o", "json")
    done = polyfleet(*GIVEN, *more)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found) == KEYS + WINDOW
    assert (found["jobs"], found["policy"]) == (60, "finish_time")
    assert set(found["planning_cpu_ms"]) == {"p50", "p99"}
    assert found["mean_jct_h"] > found["isolated_mean_h"]
    assert found["restarts"] >= 1
    written = {path.name for path in (tmp_path / "made" / "plots").iterdir()}
    assert written == {"utilisation.svg", "jct.svg", "queue.svg"}
    assert not any("mpl" in path.name for path in tmp_path.iterdir())


def test_the_table_has_the_figures_for_people(polyfleet):
    done = polyfleet(*GIVEN, "--policy", "fifo")
    assert done.returncode == 0, done.stderr
    assert "mean jct h" in done.stdout
    assert "window" not in done.stdout


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--policy", "makespam"), "error: --policy: unknown policy 'makespam'\n  did you mean 'makespan'?"),
        (
            ("--restart-cost", "-1"),
            "error: --restart-cost: -1 is not a number from 0 to 1e+07\n  the nearest valid is 0",
        ),
        (("--noise", "nan"), "error: --noise: nan is not a number from 0 to 10\n  the nearest valid is 0"),
        (("--window", "100:300"), "error: --window: 100:300 is not within the job ids 0 to 59 of trace.csv"),
        (("--fleet", "v100=2"), "error: trace.csv, row "),
        (("--trace", "absent.csv"), "error: absent.csv cannot be read: No such file or directory"),
        (("--faults", "absent.yaml"), "error: absent.yaml cannot be read: No such file or directory"),
    ],
    ids=str,
)
def test_bad_input_ends_with_2_and_writes_nothing(polyfleet, tmp_path, more, told):
    done = polyfleet(*GIVEN, "--plots", "plots", "-o", "json", *more)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(told)
    assert not (tmp_path / "plots").exists()


def test_a_folder_for_pictures_that_is_a_file_is_the_users_mistake(polyfleet, tmp_path):
    (tmp_path / "plots").write_text("")
    done = polyfleet(*GIVEN, "--plots", "plots")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --plots: plots cannot be created: File exists")


HERE = Path()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "--trace or --log is missing"),
        ({"trace": HERE, "log": "."}, "both --trace and --log are present; name a CSV file with --trace, or"),
        ({"trace": HERE, "fleet": "a=1"}, "--throughputs is missing; --trace needs --throughputs and --fleet"),
        ({"trace": HERE, "throughputs": HERE}, "--fleet is missing; --trace needs"),
        ({"trace": HERE, "until": "1d"}, "--until cannot be combined with --trace; leave --until out"),
        ({"log": "absent"}, "--log: there is no file or folder absent; name a server's home, its database"),
        ({"log": ".", "throughputs": HERE}, "--throughputs cannot be combined with --log; leave --throughputs out"),
        ({"log": ".", "until": "soon"}, "--until 'soon' is not a time; write 30m, 2h, 7d, or 2026-11-20"),
        ({"log": "."}, "there is no job store in "),
    ],
    ids=str,
)
def test_what_to_simulate_has_to_be_said_once(options, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"^{re.escape(told)}"):
        simulate(**options)


def test_nodes_fail_as_a_file_says(polyfleet, tmp_path):
    (tmp_path / "fleet.yaml").write_text(
        "kinds: {v100: {nodes: 2, devices: 2, mtbf_h: 5, repair_h: 1}, t4: {nodes: 1, devices: 4}}\n"
    )
    (tmp_path / "sure.yaml").write_text("events: [{kind: t4, node: 0, down_h: 1, up_h: 2}]\n")
    told = [
        json.loads(polyfleet(*GIVEN, "--fleet", "fleet.yaml", *more, "-o", "json").stdout)
        for more in ((), ("--faults", "sure.yaml"))
    ]
    assert list(told[0]) == [*KEYS, "faults", "interruptions", "lost_device_h"]
    assert told[0]["interruptions"] > 0
    assert told[0]["lost_device_h"] > 0
    assert told[0]["mean_jct_h"] != told[1]["mean_jct_h"]


def test_the_answer_about_a_servers_log_has_its_own_figures_beside_those_of_the_policy(polyfleet, tmp_path):
    store = EventStore(f"sqlite:///{tmp_path / 'polyfleet.db'}")
    for number, kind in enumerate(("cpu", "cpu", "tpu:v5e")):
        job = Job(f"j{number}", "j", "run", (Candidate(("cpu",)), Candidate(("tpu",))), submitted_s=60.0 * number)
        at_s = 1000.0 * number
        store.append([
            submitted(job, {}, job.submitted_s),
            placed(job, Start(job.id, 0, (("node/d", (0,)),)), kind, "pool", at_s),
            Event(job.id, "started", 1, at_s + 30),
            Event(job.id, "finished", 1, at_s + 900),
        ])  # fmt: skip
    store.append([submitted(Job("never", "n", "run", (Candidate(("cpu",)),)), {}, 1.0)])
    done = polyfleet("simulate", "--log", ".", "--policy", "fifo", "-o", "json")  # beside the store that is open
    store.close()
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    more = ["as_it_was", "fleet", "restart_cost_s", "assumed_rates", "unfinished", "skipped"]
    assert list(found) == KEYS + more
    assert (found["jobs"], found["assumed_rates"], found["unfinished"]) == (3, 3, 0)
    assert found["skipped"] == {"never_ran": 1, "no_kind": 0, "unreadable": 0}
    assert found["fleet"] == {"cpu": 1, "tpu:v5e": 1}
    assert found["restart_cost_s"] == 30.0
    assert found["as_it_was"]["mean_jct_h"] > found["mean_jct_h"]


def test_the_help_names_the_policies_that_there_are():
    assert sorted(TOLD.removesuffix(".").replace(" or ", ", ").split(", ")) == sorted(POLICIES)
    assert DEFAULT == "finish_time"


def test_the_whole_controller_ends_the_same_jobs_not_much_later(polyfleet):
    plain, whole = (
        json.loads(polyfleet(*GIVEN, "--restart-cost", "60", "-o", "json", *more).stdout)
        for more in ((), ("--controller", "--per-node", "4"))
    )
    assert list(whole) == list(plain) == KEYS
    assert whole["jobs"] == plain["jobs"] == 60
    assert plain["isolated_mean_h"] == whole["isolated_mean_h"] < whole["mean_jct_h"] < 1.2 * plain["mean_jct_h"]
    assert whole["restarts"] >= 1


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--per-node", "4"), "--per-node 4 is not valid here"),
        (("--controller", "--per-node", "0"), "--per-node 0 is not valid here"),
        (("--controller", "--noise", "0.5"), "--noise cannot be combined with --controller"),
    ],
)
def test_what_the_whole_controller_does_not_take_is_refused(polyfleet, more, said):
    done = polyfleet(*GIVEN, *more)
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr

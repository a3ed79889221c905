"""What a command says of jobs, logs, checkpoints and nodes is true in the states in which it is easily false: no fleet
is up, a node is away, or what was asked for has another name.
"""

import json
import shutil
from pathlib import Path

import pytest

from orchestrator import client as http

CHECKPOINTS = Path(__file__).parents[2] / "data" / "checkpoint-v1"
ECHO = {"task": "run", "command": ["echo", "printed"], "name": "talked"}
DOWN = "no fleet is up"


def submit(spec):
    with http.connect(start=False) as client:
        return client.submit(spec)


@pytest.fixture
def talked(live):
    """A job that printed and saved a checkpoint, on cpu-0."""
    job = live.ran(ECHO | {"resources": {"pool": "cpu"}})
    shutil.copytree(CHECKPOINTS, live.home / "storage" / "cpu" / job["id"])
    return job


@pytest.fixture
def down(live, talked):
    live.fleet.down(live.service)
    return talked


def test_a_log_that_is_on_a_node_of_a_fleet_that_is_down_is_not_told_to_be_empty(here, down):
    for words in (["logs", "talked"], ["logs", "-f", "talked"], ["logs", "talked", "--rank", "0", "--tail", "5"]):
        done = here(*words)
        assert (done.returncode, done.stdout) == (3, ""), words
        assert "printed nothing" not in done.stderr
        sentence = (
            "the log of attempt 1 is on node cpu-0, which cannot be reached: no fleet is up; `polyfleet up` brings"
        )
        assert sentence in done.stderr


OF_CHECKPOINTS = (
    "list", "list --pool cpu", "list cpu:", "show cpu:talked", "verify cpu:talked", "plan cpu:talked --to tpu:v5e",
    "prune cpu:talked --keep 1", "pin cpu:talked", "copy cpu:talked xla:there",
)  # fmt: skip
OF_NODES = (
    "inventory", "backends", "benchmark run mlp", "node drain cpu-0", "node resume cpu-0", "node remove cpu-0",
    "explain talked", "files ls talked",
)  # fmt: skip


def test_checkpoints_of_a_fleet_that_is_down_are_told_to_be_on_its_nodes(here, down):
    for verb in OF_CHECKPOINTS:
        done = here("checkpoint", *verb.split())
        assert (done.returncode, done.stdout) == (3, ""), verb
        assert "no fleet is up, and checkpoints are read through its nodes (pool cpu: cpu-0; pool ipex: " in done.stderr
        assert "run `polyfleet up` first" in done.stderr


def test_a_fleet_that_is_down_is_not_told_to_have_no_nodes(here, down):
    for verb in OF_NODES:
        done = here(*verb.split())
        assert (done.returncode, done.stdout) == (3, ""), verb
        assert DOWN in done.stderr and "polyfleet up" in done.stderr
    said = here("files", "ls", "talked").stderr
    assert "lie on node cpu-0, which cannot be reached: no fleet is up" in said and "gone" not in said
    found = here("doctor")
    assert (found.returncode, DOWN in found.stdout, "no findings" in found.stdout) == (1, True, False)
    assert "no nodes; `polyfleet up` brings a fleet up" in here("top", "--once").stdout


def test_a_job_that_is_running_when_its_fleet_goes_down_is_told_as_it_was_last_seen(here, live, talking, wait_for):
    job = submit(talking.spec)["id"]
    wait_for(lambda: json.loads(here("show", job, "-o", "json").stdout)["state"] == "RUNNING")
    assert here("jobs").stdout.splitlines()[1].split()[-1] != DOWN
    live.fleet.down(live.service)
    told = "no fleet is up; that is its state when its node last answered"
    assert told in here("jobs").stdout and told in here("show", job).stdout


def test_a_move_to_a_pool_of_a_fleet_that_is_down_means_the_pool(live, talked, recorded):
    live.fleet.hold(live.service)
    job = submit({"task": "run", "command": "true", "name": "moves"})["id"]
    with http.connect(start=False) as client:
        client.migrate(job, "xla")
    assert [one.pool for one in live.service.jobs_table.find(job).job.candidates] == ["xla"]


def test_checkpoints_of_a_node_that_is_away_are_named_beside_those_that_are_listed(here, live, talked):
    shutil.copytree(CHECKPOINTS, live.home / "storage" / "xla" / "elsewhere")
    both = json.loads(here("checkpoint", "list", "-o", "json").stdout)
    assert {row["pool"] for row in both} == {"cpu", "xla"}
    live.fleet.lose(live.service, "cpu-0")
    done = here("checkpoint", "list")
    assert (done.returncode, "xla:elsewhere" in done.stdout, "cpu:" in done.stdout) == (0, True, False)
    assert "checkpoints of pool cpu on node cpu-0, which has been away for" in done.stderr
    shutil.rmtree(live.home / "storage" / "xla" / "elsewhere")
    nothing = here("checkpoint", "list")
    assert (nothing.returncode, nothing.stdout) == (3, "") and "cpu-0, which has been away for" in nothing.stderr


def test_checkpoints_are_listed_and_shown_by_pool_job_and_name(here, live, talked):
    def places(*words):
        return {f"{row['pool']}:{row['path']}" for row in json.loads(here("checkpoint", *words, "-o", "json").stdout)}

    mine = f"cpu:{talked['id']}/step-00000012-adeb0f13"
    for words in (["list"], ["list", "cpu"], ["list", "cpu:"], ["list", "--pool", "cpu"], ["list", "talked"],
                  ["list", "cpu:talked"], ["list", talked["id"]]):  # fmt: skip
        assert places(*words) == {mine}, words
    assert places("list", "xla") == places("list", "xla:talked") == set()
    assert "no checkpoints below xla:talked" in here("checkpoint", "list", "xla:talked").stdout
    for ref in ("cpu:talked", "cpu:talked/step-00000012-adeb0f13", f"cpu:{talked['id']}"):
        assert json.loads(here("checkpoint", "show", ref, "-o", "json").stdout)["path"] == mine[4:], ref
        assert here("checkpoint", "verify", ref).returncode == 0
    absent = here("checkpoint", "show", "cpu:other")
    assert (absent.returncode, "no checkpoint at cpu:other" in absent.stderr) == (2, True)


def test_jobs_are_chosen_by_a_pattern_and_none_that_matches_is_not_no_jobs(here, live):
    live.fleet.hold(live.service)
    ids = {name: submit(ECHO | {"name": name})["id"] for name in ("sweep-1", "sweep-2", "Sweep-3", "a-sweep", "other")}

    def chosen(*words):
        return {row["id"] for row in json.loads(here("jobs", *words, "-o", "json").stdout)}

    assert chosen("--name", "sweep-*") == {ids["sweep-1"], ids["sweep-2"]}
    assert chosen("--name", "*sweep*") == {ids["sweep-1"], ids["sweep-2"], ids["a-sweep"]}
    assert chosen("--name", "sweep-?", "--state", "PENDING") == {ids["sweep-1"], ids["sweep-2"]}
    assert chosen("--name", "?-sweep") == {ids["a-sweep"]} and chosen("--name", "*") == set(ids.values())
    assert chosen("--name", "sweep") == chosen("--name", "asweep") == set()
    assert (
        here("jobs", "--name", "sweap-*").stdout
        == "no job matches --name 'sweap-*'; `polyfleet jobs --all` lists every job\n"
    )
    assert "no job matches --state 'FAILED'" in here("jobs", "--state", "FAILED").stdout

"""What a command says of jobs, logs, checkpoints and nodes is true in the states in which it is easily false: no fleet
is up, a node is away, or what was asked for has another name.
"""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.errors import FleetError
from orchestrator import Orchestrator
from orchestrator.client import client as http
from orchestrator.core.jobs.fold import Attempt, Record
from orchestrator.core.model import Candidate, Job
from orchestrator.core.states import State
from orchestrator.runtime.agents import reservations
from orchestrator.runtime.agents.ray_capacity import RayResources, explain_shortage
from orchestrator.services.views import resume_clause
from orchestrator.verbs import jobs

CHECKPOINTS = Path(__file__).parents[2] / "data" / "checkpoint-v1"
ECHO = {"task": "run", "command": ["echo", "printed"], "name": "talked"}
DOWN = "no fleet is up"


def submit(spec):
    with http.connect(start=False) as client:
        return client.jobs.submit(spec)


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
        sentence = "the log of attempt 1 is on node cpu-0, which cannot be reached: no fleet is up; run `polyfleet up`"
        assert sentence in done.stderr


OF_CHECKPOINTS = (
    "list", "list --pool cpu", "list cpu:", "show cpu:talked", "verify cpu:talked", "plan cpu:talked --to tpu:v5e",
    "show talked", "prune talked --keep 1", "prune cpu:talked --keep 1", "pin cpu:talked", "copy cpu:talked xla:there",
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
    assert "are on node cpu-0, which cannot be reached: no fleet is up" in said and "gone" not in said
    found = here("doctor")
    assert (found.returncode, DOWN in found.stdout, "no findings" in found.stdout) == (1, True, False)
    assert "no nodes; run `polyfleet up` to start a fleet" in here("top", "--once").stdout


def test_a_job_that_is_running_when_its_fleet_goes_down_is_told_as_it_was_last_seen(here, live, talking, wait_for):
    job = submit(talking.spec)["id"]
    wait_for(lambda: json.loads(here("show", job, "-o", "json").stdout)["state"] == "RUNNING")
    assert here("jobs").stdout.splitlines()[1].split()[-1] != DOWN
    running = json.loads(here("show", job, "-o", "json").stdout)
    live.fleet.down(live.service)
    known = json.loads(here("show", job, "-o", "json").stdout)["known_until"]
    assert running["known_until"] is None and known >= running["started_at"]
    at = known[:19].replace("T", " ")
    told = f"no fleet is up; it was RUNNING at the last contact, {at} UTC"
    assert told in here("jobs").stdout and told in here("show", job).stdout and told in here("top", "--once").stdout
    ran = [json.loads(here("jobs", "-o", "json").stdout)[0]["known_until"] for _ in range(2)]
    assert ran == [known, known], "it does not count on"
    assert json.loads((live.home / "inventory.json").read_text())["heard_s"]["cpu-0"] > 0, "the next server knows it"


def test_a_move_to_a_pool_of_a_fleet_that_is_down_means_the_pool(live, talked, recorded):
    live.fleet.hold(live.service)
    job = submit({"task": "run", "command": "true", "name": "moves"})["id"]
    with http.connect(start=False) as client:
        client.jobs.migrate(job, "xla")
    assert [one.pool for one in live.service.jobs_table.find(job).job.candidates] == ["xla"]


def test_a_job_that_waits_says_for_what_who_holds_it_and_who_is_ahead(here, live, talking, wait_for):
    there = {"resources": {"pool": "xla"}}
    holder = submit(talking.spec | there | {"priority": 5})["id"]
    wait_for(lambda: json.loads(here("show", holder, "-o", "json").stdout)["state"] == "RUNNING")
    first, second, urgent = (submit(ECHO | there | more)["id"] for more in ({}, {}, {"priority": 5, "name": "urgent"}))
    device = "waits for 1 device on xla-0/tpu:emulated, held by " + holder
    wait_for(lambda: device in jobs.show(live.hub, urgent)["reason"])
    whys = {job: jobs.show(live.hub, job)["reason"] for job in (first, second, urgent)}
    for job, ahead in ((urgent, 0), (first, 1), (second, 2)):
        queue = {0: "", 1: "; 1 job that waits for the same is ahead of it"}
        assert whys[job] == device + queue.get(ahead, f"; {ahead} jobs that wait for the same are ahead of it")
    assert "is in pool" not in here("jobs").stdout
    said = here("explain", holder).stdout
    assert "runs as candidate 1 on xla-0/tpu:emulated [0]" in said and "runs here" in said
    assert "would wait" not in said and "0 of 1 device" not in said and "waits for" not in said
    assert "has 0 of 1 device free, but the job needs 1; held by " + holder in here("explain", first).stdout


def test_a_move_says_before_it_from_what_the_job_will_go_on_and_show_what_it_went_on_from(
    here, live, talking, wait_for
):
    job = submit(talking.spec | {"resources": {"pool": "cpu"}})["id"]
    wait_for(lambda: jobs.show(live.hub, job)["state"] == "RUNNING")
    assert "started again" not in here("show", job).stdout
    done = here("migrate", "talks", "--to", "xla")
    assert done.returncode == 0
    assert f"{job}: after a move it starts from the beginning, with its files: it has no checkpoint; " in done.stderr
    wait_for(lambda: (view := jobs.show(live.hub, job))["state"] == "RUNNING" and view["pool"] == "xla")
    assert "no: it started again without a checkpoint" in here("show", job).stdout


def test_what_a_job_would_continue_from_is_what_is_known_of_its_checkpoints():
    command, script = Candidate(("cpu",)), Candidate(("cpu",), arguments={"checkpoint": {"path": "ckpt.pt"}})
    train, run = Job("j", "j", "train", (command,)), Job("j", "j", "run", (command,))
    attempt = Attempt(1, 0, "cpu", "cpu", (), 0.0)
    point = {"pool": "cpu", "path": "j/step-00000007", "step": 7}
    for record, begin in (
        (Record(train, checkpoint=point), "continues from cpu:j/step-00000007 (step 7)"),
        (Record(train), "starts from the beginning, unless it saves a checkpoint before it stops"),
        (Record(replace(train, resume_from="cpu:other")), "starts again from cpu:other"),
        (Record(run), "starts from the beginning, with its files: it has no checkpoint"),
        (Record(replace(run, candidates=(script,))), "continues from ckpt.pt in its files, if its script has saved"),
    ):
        assert resume_clause(replace(record, attempts=(attempt,))).startswith(begin), record
    assert resume_clause(Record(run)) == ""
    assert resume_clause(Record(replace(run, state=State.SUCCEEDED), attempts=(attempt,))) == ""


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
        == "no job matches --name 'sweap-*'; run `polyfleet jobs --all` to list every job\n"
    )
    assert "no job matches --state 'FAILED'" in here("jobs", "--state", "FAILED").stdout


def test_logs_of_which_a_part_is_on_a_node_that_is_away_are_shown_and_told_to_be_a_part(
    here, live, talking, wait_for, command
):
    job = submit(talking.spec | {"resources": {"pool": "cpu"}})["id"]
    talking.say("first\n")
    wait_for(lambda: here("logs", job).stdout == "first\n")
    assert here("migrate", job, "--to", "xla").returncode == 0
    wait_for(lambda: (view := jobs.show(live.hub, job))["state"] == "RUNNING" and view["pool"] == "xla")
    talking.say("second\n")
    wait_for(lambda: here("logs", job).stdout == "first\nsecond\n")
    live.fleet.lose(live.service, "cpu-0")
    why = "the log of attempt 1 is on node cpu-0, which has been away for "
    for words in ([], ["--tail", "2"]):
        done = here("logs", job, *words)
        assert (done.returncode, done.stdout) == (
            3,
            "second\n",
        ) and f"a part of the log is missing: {why}" in done.stderr
    for words in (["--attempt", "2"], ["--tail", "1"]):
        done = here("logs", job, *words)
        assert (done.returncode, done.stdout, done.stderr) == (0, "second\n", ""), "all that was asked for is here"
    nothing = here("logs", job, "--tail", "0")
    assert (nothing.returncode, nothing.stdout, nothing.stderr) == (0, "", "")
    with Orchestrator.connect(start=False) as o:
        shown = str(o.job(job).logs()).splitlines()
        assert shown[0] == "second" and shown[1].startswith(f"… missing: {why}")
        assert o.job(job).logs(tail=1).away == ()
    words = [*command, "logs", "-f", job]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as following:
        assert following.stdout.readline() == "second\n"
        talking.end()
        rest, notes = following.communicate()
    assert (following.returncode, rest) == (0, "") and f"note: an earlier part of the log is missing: {why}" in notes
    wait_for(lambda: jobs.show(live.hub, job)["state"] == "SUCCEEDED")
    followed = here("logs", "-f", job)
    assert (followed.returncode, followed.stdout) == (3, "second\n") and why in followed.stderr


def test_a_node_that_does_not_answer_when_it_is_asked_is_not_told_to_have_nothing(here, live, talked):
    """It is not called silent yet."""
    live.fleet.agent("cpu-0").log_tail_range = live.fleet.agent("cpu-0").logs = refuses(
        "log: did not respond within 30 s"
    )
    done = here("logs", "talked")
    assert (done.returncode, done.stdout) == (3, "")
    assert "on node cpu-0, which did not respond (log: did not respond within 30 s)" in done.stderr


def refuses(why):
    def call(*_):
        raise FleetError(why)

    return call


def test_a_device_that_another_user_of_the_ray_cluster_holds_is_told_to_be_in_use(here, live, monkeypatch, wait_for):
    """What Ray tells is recorded: all of the node is taken, by a driver that is not ours."""

    def refuse(place, bundles, ids):
        has, free = {node: {"CPU": 64.0} for node in ids}, {node: {} for node in ids}
        raise explain_shortage(bundles, ids, RayResources(has, free, {}, frozenset(ids)))

    monkeypatch.setattr(reservations, "reserve", refuse)
    spec = ECHO | {"resources": {"pool": "cpu"}, "recovery": {"backoff": "30s"}}
    job = submit(spec)["id"]
    wait_for(lambda: jobs.show(live.hub, job)["attempts"] and jobs.show(live.hub, job)["state"] == "RECOVERING")
    why = "of node cpu-0 as free: another program of this Ray cluster uses them, or Ray missed"
    for words in (["jobs"], ["show", job], ["explain", job]):
        # the next plan adds when it is tried again
        said = wait_for(lambda words=words: "after 1 failed start" in (text := here(*words).stdout) and text, words)
        assert why in said and "waits for" not in said, words
    devices = {line.split()[1]: line for line in here("inventory").stdout.splitlines()[1:]}
    assert "ready; another program of this Ray cluster used devices of this node" in devices["cpu-0"]
    assert devices["xla-0"].endswith("ready")
    monkeypatch.setattr(reservations, "reserve", lambda *_: None)
    live.ran(ECHO | {"name": "next", "resources": {"pool": "cpu"}})
    assert "another program" not in here("inventory").stdout


def test_a_job_names_its_checkpoints_wherever_a_checkpoint_is_named(here, live, talked, tmp_path, monkeypatch):
    def answer(*words):
        done = here("checkpoint", *words, "-o", "json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    for ref in ("talked", talked["id"], "cpu:talked"):
        assert answer("show", ref)["path"] == f"{talked['id']}/step-00000012-adeb0f13"
        assert answer("verify", ref)["ok"] and answer("plan", ref, "--to", "cpu")["step"] == 12
        assert len(answer("prune", ref, "--keep", "1", "--dry-run")["kept"]) == 1
    assert answer("pin", "talked")["pinned"]
    with Orchestrator.connect(start=False) as o:
        assert o.checkpoints.show("talked")["step"] == 12 and len(o.checkpoints.prune("cpu:talked", 1)["kept"]) == 1
    shutil.copytree(CHECKPOINTS, live.home / "storage" / "xla" / talked["id"])
    several = here("checkpoint", "show", "talked")
    assert (several.returncode, f"pools cpu, xla have checkpoints of job {talked['id']}" in several.stderr) == (2, True)
    assert "name one: cpu:talked" in several.stderr
    none = live.ran(ECHO | {"name": "unsaved"})["id"]
    assert f"job {none} has no checkpoint" in here("checkpoint", "show", "unsaved").stderr
    monkeypatch.chdir(tmp_path)
    (tmp_path / "talked").mkdir()
    assert "pools cpu" not in here("checkpoint", "show", "talked").stderr, "a folder of this machine is meant"

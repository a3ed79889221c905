"""Nodes are taken out of use and back, jobs are moved and renamed: by client and command, and refused with words."""

from dataclasses import replace

import pytest

from cluster.errors import Conflict, NotFound, SpecError, UserError
from orchestrator.client import client as http
from orchestrator.verbs import jobs, nodes

ON_CPU = {"task": "run", "command": "true", "name": "hello", "resources": {"pool": "cpu"}}


@pytest.fixture
def client(live):
    with http.connect(start=False) as client:
        yield client


def test_a_drained_node_takes_no_job_until_it_is_resumed(client, wait_for):
    view = client.nodes.drain("cpu-0", reason="new fans")
    assert (view["state"], view["reason"]) == ("drained", "new fans")
    job = client.jobs.submit(ON_CPU)["id"]
    wait_for(lambda: "new fans" in client.jobs.show(job)["reason"])
    assert client.jobs.show(job)["state"] == "PENDING"
    assert client.nodes.resume("cpu-0")["state"] == "ready"
    assert client.wait(job)["state"] == "SUCCEEDED"
    for verb in (client.nodes.drain, client.nodes.resume):
        with pytest.raises(NotFound, match="absent"):
            verb("absent")


def test_a_drain_outlives_the_server(client, live, wait_for):
    client.nodes.drain("xla-0")
    live.service.close()
    again = type(live.service)(live.home)
    hub = replace(live.hub, service=again)
    wait_for(lambda: {node["node"]: node["state"] for node in nodes.list_(hub)}["xla-0"] == "drained")
    again.close()


def test_a_running_job_moves_to_another_pool_and_goes_on_there(client, talking, wait_for):
    job = client.jobs.submit({**talking.spec, "resources": {"pool": "cpu"}, "recovery": {"grace": "1s"}})["id"]
    wait_for(lambda: client.jobs.show(job)["state"] == "RUNNING")
    assert client.jobs.migrate(job, "ipex")["id"] == job
    wait_for(lambda: (view := client.jobs.show(job))["state"] == "RUNNING" and view["pool"] == "ipex")
    talking.end()
    assert client.wait(job)["state"] == "SUCCEEDED"
    with pytest.raises((Conflict, UserError), match="has ended"):
        client.jobs.migrate(job, "cpu")


def test_a_move_to_what_is_not_there_is_refused_with_words(client, talking, wait_for):
    job = client.jobs.submit({**talking.spec, "resources": {"pool": "cpu"}})["id"]
    wait_for(lambda: client.jobs.show(job)["state"] == "RUNNING")
    with pytest.raises(Conflict, match=f"job {job} cannot move to tpu:v5e now"):
        client.jobs.migrate(job, "tpu:v5e")
    with pytest.raises(SpecError) as wrong:
        client.jobs.migrate(job, "tqu")
    assert wrong.value.field == "to"
    assert client.jobs.show(job)["state"] == "RUNNING"


def test_the_command_says_what_became_of_a_node(here, live):
    done = here("node", "drain", "cpu-0", "--reason", "new fans")
    assert (done.returncode, done.stdout, done.stderr) == (0, "cpu-0: drained: new fans\n", "")
    assert "drained" in here("inventory").stdout
    done = here("node", "resume", "cpu-0")
    assert (done.returncode, done.stdout) == (0, "cpu-0: ready\n")
    assert here("node", "drain", "absent").returncode == 2


def test_the_command_moves_a_running_job(here, live, talking, wait_for):
    spec = {**talking.spec, "resources": {"pool": "cpu"}, "recovery": {"grace": "1s"}}
    job = live.service.submissions.submit(spec)["id"]
    wait_for(lambda: jobs.show(live.hub, job)["state"] == "RUNNING")
    done = here("migrate", job, "--to", "ipex")
    assert (done.returncode, done.stderr.startswith(f"{job}: after a move it starts from the beginning")) == (0, True)
    told, _, state = done.stdout.rstrip("\n").partition(": ")
    assert told == job and state in ("SAVING", "RECOVERING", "STARTING", "RUNNING")
    wait_for(lambda: (view := jobs.show(live.hub, job))["state"] == "RUNNING" and view["pool"] == "ipex")
    refused = here("migrate", job, "--to", "ipex")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"\nerror: job {job} already runs on " in refused.stderr


def test_a_job_is_renamed_until_it_ends_and_the_name_outlives_the_server(client, live, here):
    client.nodes.drain("cpu-0")
    job = client.jobs.submit(ON_CPU)["id"]
    assert client.jobs.rename(job, "first", key="k")["name"] == "first"
    assert here("rename", job, "second").stdout.strip() == f"{job}: second"
    assert client.jobs.rename(job, "first", key="k")["name"] == "first"  # the stored response
    assert [row["id"] for row in client.jobs.list(name="second")] == [job] and client.jobs.list(name="hello") == []
    assert [e["data"]["name"] for e in client.jobs.history(job) if e["event"] == "renamed"] == ["first", "second"]
    with pytest.raises(SpecError, match="name: 'no name' is not a valid name") as wrong:
        client.jobs.rename(job, "no name")
    assert wrong.value.remedy == "use up to 63 letters, digits, '-' and '_', a letter or digit first and last"
    client.jobs.cancel(job)
    with pytest.raises((Conflict, UserError), match="its name is final"):
        client.jobs.rename(job, "third")
    live.service.close()
    again = type(live.service)(live.home)
    assert again.jobs_table.find("second").job.id == job
    again.close()

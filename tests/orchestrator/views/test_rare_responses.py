"""Responses that no other test with a server requests: `live` checks each against its view."""

import hashlib

import pytest

from orchestrator.client import client as http


@pytest.fixture
def client(live):
    with http.connect(live.home, start=False) as client:
        yield client


def test_a_converted_checkpoint_differs_from_its_source(client, checkpoint):
    to_bfloat16 = {"dtype": {"float32": "bfloat16"}, "on_lossy": "allow"}
    converted = client.checkpoints.convert(checkpoint, "cpu:converted", **to_bfloat16)
    assert converted["converted"] and converted["lossy"]
    difference = client.checkpoints.diff(checkpoint, converted["ref"])
    assert difference["tensors"] and not difference["same"]
    assert client.checkpoints.diff(checkpoint, checkpoint)["same"]


def test_a_copy_for_another_kind_is_converted(client, checkpoint):
    result = client.checkpoints.copy(checkpoint, "xla:copied", to_kind="tpu:v5e")
    assert result["conversion"]["ref"] == result["target"]


def test_every_response_names_a_checkpoint_in_the_same_three_fields(client, checkpoint):
    verbs = client.checkpoints
    to_bfloat16 = {"dtype": {"float32": "bfloat16"}, "on_lossy": "allow"}
    exported = verbs.export(checkpoint, "cpu:weights.safetensors", entry="model")
    responses = [
        verbs.list(pool="cpu")[0], verbs.show(checkpoint), verbs.verify(checkpoint), verbs.pin(checkpoint),
        verbs.convert(checkpoint, "cpu:half", **to_bfloat16),
        exported, verbs.import_(exported["ref"], root="cpu:imported"),
    ]  # fmt: skip
    for view in responses:
        assert (view["pool"], view["ref"]) == ("cpu", f"cpu:{view['path']}"), view
        assert view is exported or verbs.show(view["ref"])["path"] == view["path"]


def test_an_upload_has_hashes_of_what_was_sent(client):
    upload, data = "0123456789", b"some data"
    assert client.files.begin_upload(upload, "") == {"there": {}}
    client.files.send_piece(upload, "", "a", hashlib.sha256(data).hexdigest(), data)
    assert client.files.upload_hashes(upload, "", "a")["sha256"] == [hashlib.sha256(data).hexdigest()]


def test_a_lost_node_is_removed(live, client):
    live.fleet.lose(live.service, "xla-0")
    view = client.nodes.remove("xla-0")
    assert (view["node"], view["state"], view["devices"]) == ("xla-0", "removed", [])
    assert "xla-0" not in [node["node"] for node in client.nodes.list()]


def test_a_run_that_succeeded_becomes_the_baseline(client, measuring, wait_for):
    run = client.benchmarks.start({"cases": ["mlp"]})["run"]
    wait_for(lambda: client.benchmarks.show(run)["state"] == "SUCCEEDED")
    assert client.benchmarks.baseline(run)["baseline"]
    assert [line["line"] for line in client.benchmarks.lines(run)][-1] == "baseline"

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
    converted = client.checkpoint_tool("convert", {"source": checkpoint, "root": "cpu:converted"} | to_bfloat16)
    assert converted["converted"] and converted["lossy"]
    difference = client.checkpoint_tool("diff", {"a": checkpoint, "b": converted["path"]})
    assert difference["tensors"] and not difference["same"]
    assert client.checkpoint_tool("diff", {"a": checkpoint, "b": checkpoint})["same"]


def test_a_copy_for_another_kind_is_converted(client, checkpoint):
    result = client.checkpoint_copy({"source": checkpoint, "target": "xla:copied", "to_kind": "tpu:v5e"})
    assert result["conversion"]["path"] == result["target"]


def test_an_upload_has_hashes_of_what_was_sent(client):
    upload, data = "0123456789", b"some data"
    assert client.upload_begin("", upload) == {}
    client.upload_piece("", upload, "a", 0, data, None)
    assert client.upload_hashes("", upload, "a", 0)["sha256"] == [hashlib.sha256(data).hexdigest()]


def test_a_lost_node_is_removed(live, client):
    live.fleet.lose(live.service, "xla-0")
    view = client.node_remove("xla-0")
    assert (view["node"], view["state"], view["devices"]) == ("xla-0", "removed", [])
    assert "xla-0" not in [node["node"] for node in client.nodes()]


def test_a_run_that_succeeded_becomes_the_baseline(client, measuring, wait_for):
    run = client.benchmark_begin({"cases": ["mlp"]}, "")["run"]
    wait_for(lambda: client.benchmark(run)["state"] == "SUCCEEDED")
    assert client.benchmark_baseline(run)["baseline"]
    assert [line["line"] for line in client.benchmark_lines(run)][-1] == "baseline"

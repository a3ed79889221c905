"""Checkpoint tools that clients request: each is a verb with the parameters of its function."""

import inspect
from importlib import import_module

import pytest

from orchestrator.verbs import checkpoints
from orchestrator.verbs.declare import Exchange, verbs_of
from workers.checkpoint.tool_table import NODE_TOOLS, TOOLS

OF_THE_SERVER = {"copy", "discard", "look", "fetch", "stage", "pin_stored", "prune_stored"}
"""Tools that the server runs for copies, conversions, data, resumes and object stores of pools, never as a client names
their arguments.
"""
VERBS = {verb.name: verb for verb in verbs_of(checkpoints) if verb.exchange is Exchange.OPERATION}
GIVEN_BY_THE_NODE = {"progress", "follow_links", "files"}


def test_each_tool_of_clients_is_a_verb():
    assert set(VERBS) - {"copy"} == set(NODE_TOOLS) - OF_THE_SERVER


@pytest.mark.parametrize("name", sorted(set(NODE_TOOLS) - OF_THE_SERVER))
def test_a_verb_has_the_parameters_of_its_tool(name):
    pytest.importorskip("torch")
    tool = TOOLS[name]
    function = getattr(import_module(tool.module), tool.function.partition(":")[2])
    parameters = set(inspect.signature(function).parameters)
    assert tool.has_progress == ("progress" in parameters)
    assert tool.follows_links == ("follow_links" in parameters)
    assert set(VERBS[name].hints) - {"progress"} == parameters - GIVEN_BY_THE_NODE


@pytest.mark.parametrize("name", TOOLS)
def test_each_tool_is_found_and_its_columns_are_those_of_its_function(name):
    pytest.importorskip("torch")
    tool = TOOLS[name]
    parameters = inspect.signature(getattr(import_module(tool.module), tool.function.partition(":")[2])).parameters
    assert set(tool.locations) <= set(parameters)
    assert not tool.has_progress or "progress" in parameters
    assert not tool.follows_links or "follow_links" in parameters


@pytest.mark.parametrize(
    ("tool", "body", "field"),
    [
        ("verify", {}, "place"),
        ("diff", {"a": "cpu:a"}, "b"),
        ("prune", {"root": "cpu:a"}, "keep"),
        ("prune", {"root": "cpu:a", "keep": True}, "keep"),
        ("prune", {"root": "cpu:a", "keep": 1, "dry_run": "no"}, "dry_run"),
        ("pin", {"path": ["cpu:a"]}, "path"),
        ("pin", {"path": "cpu:a", "delete": True}, "delete"),
        ("convert", {"source": "cpu:a", "root": "cpu:b", "dtype": ["bfloat16"]}, "dtype"),
        ("convert", {"source": "cpu:a", "root": "cpu:b", "on_lossy": "ignore"}, "on_lossy"),
        ("import", {"source": "cpu:a", "root": "cpu:b", "step": -1}, "step"),
        ("export", {"source": "cpu:a"}, "target"),
    ],
)
def test_a_wrong_argument_is_named_before_a_tool_runs(shared_live, tool, body, field):
    with shared_live.http as client:
        answer = client.post(f"/v1/checkpoints/{tool}", json=body)
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, field)


def test_an_import_without_a_folder_says_what_is_missing(shared_live):
    with shared_live.http as client:
        text = client.post("/v1/checkpoints/import", json={"source": "cpu:a"}).text
    assert "root: is missing" in text and "write POOL:PATH" in text


def test_there_is_no_route_for_a_tool_by_its_name(shared_live):
    with shared_live.http as client:
        for name in ("verify", "discard", "fetch", "list"):
            assert client.post(f"/v1/checkpoints/tools/{name}", json={"arguments": {}}).status_code == 404
        for name in OF_THE_SERVER - {"copy"}:
            assert client.post(f"/v1/checkpoints/{name}", json={"path": "cpu:a"}).status_code == 404

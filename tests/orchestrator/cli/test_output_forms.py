"""Every reading verb prints a table, JSON or YAML on stdout, and nothing else there."""

import json

import pytest

from cluster.input import strict_yaml

READING = [
    ["status"],
    ["inventory"],
    ["backends"],
    ["doctor"],
    ["jobs"],
    ["show", "hello"],
    ["explain", "hello"],
    ["explain", "hello", "--if", "pool cpu down", "--if", "+4 amd:MI300X"],
    ["debug", "story", "hello"],
    ["offer", "--entry", "package:train"],
    ["checkpoint", "list"],
    ["checkpoint", "show", "cpu:digits"],
    ["checkpoint", "verify", "cpu:digits"],
    ["checkpoint", "plan", "cpu:digits", "--to", "tpu:v5e"],
    ["checkpoint", "copy", "cpu:digits", "cpu:digits"],
    ["env", "list"],
    ["server", "status"],
    ["cancel", "hello"],
]


@pytest.fixture(scope="module", autouse=True)
def finished(shared_live):
    """A job that has ended, and a checkpoint."""
    shared_live.store_checkpoint()
    return shared_live.ran({"task": "run", "command": "true", "name": "hello"})


@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_json_and_yaml_say_the_same_and_stand_alone(here, words):
    as_json, as_yaml = here(*words, "-o", "json"), here(*words, "-o", "yaml")
    assert (as_json.returncode, as_json.stderr) == (0, "")
    data = json.loads(as_json.stdout)
    read = strict_yaml.load("top:\n" + "".join(f"  {line}\n" for line in as_yaml.stdout.splitlines()), "stdout")
    assert shape(read) == shape({"top": data})


def shape(data):
    """With `number` for each number: between two answers time passes."""
    if isinstance(data, dict):
        return {key: shape(value) for key, value in data.items()}
    if isinstance(data, list):
        return [shape(value) for value in data]
    return "number" if isinstance(data, int | float) and not isinstance(data, bool) else data


@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_a_table_on_a_pipe_has_no_colours_and_cuts_nothing(here, words):
    done = here(*words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()
    assert "\x1b" not in done.stdout
    assert "…" not in done.stdout

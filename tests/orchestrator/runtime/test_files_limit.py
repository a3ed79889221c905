"""What the files of ended jobs may take in a pool's storage, and that they go with their jobs."""

import sys

import pytest

from cluster.errors import UserError
from orchestrator.runtime.jobs.files_limit import FilesLimit, keep_files_bytes, select_jobs

WRITE = "import os, pathlib; pathlib.Path(os.environ['POLYFLEET_OUTPUT_DIR'], 'f').write_text('x' * 1000)"


def spec(code=WRITE):
    return {"task": "run", "name": "writes", "command": [sys.executable, "-c", code], "resources": {"pool": "cpu"}}


def test_those_that_ended_longest_ago_go_first_until_the_rest_is_within_the_limit():
    sizes = {"old": 40, "runs": 50, "new": 30, "older": 10}
    ended_s = {"new": 300.0, "old": 200.0, "older": 100.0}
    assert select_jobs(sizes, ended_s, 130) == []
    assert select_jobs(sizes, ended_s, 125) == ["older"]
    assert select_jobs(sizes, ended_s, 80) == ["older", "old"]
    assert select_jobs(sizes, ended_s, 10) == ["older", "old", "new"]


@pytest.mark.parametrize(("text", "most"), [("", None), ("forever", None), ("500GB", 500 * 10**9), ("1MiB", 1 << 20)])
def test_the_limit_is_a_size_or_none(text, most):
    assert keep_files_bytes({"POLYFLEET_KEEP_FILES": text}) == most


def test_a_limit_that_is_no_size_is_refused_with_the_setting_s_name():
    with pytest.raises(UserError, match="POLYFLEET_KEEP_FILES: '7' is not a size"):
        keep_files_bytes({"POLYFLEET_KEEP_FILES": "7"})


def test_over_the_limit_only_ended_jobs_lose_their_files(live, talking, wait_for):
    first, second = live.ran(spec())["id"], live.ran(spec())["id"]
    runs = live.service.submissions.submit(spec(f"{WRITE}; open({talking.spec['command'][1]!r}).read()"))["id"]
    storage = live.home / "storage/cpu"
    wait_for(lambda: (file := storage / runs / "output-1/f").exists() and file.stat().st_size == 1000)
    FilesLimit(live.service.agents, live.service.jobs_table, 2000).remove()
    assert [(storage / job / "output-1/f").exists() for job in (runs, first, second)] == [True, False, True]
    FilesLimit(live.service.agents, live.service.jobs_table, 0).remove()
    assert [(storage / job).exists() for job in (runs, first, second)] == [True, False, False]
    talking.end()


def test_the_files_of_a_removed_job_go_with_its_records(live):
    job = live.ran(spec())["id"]
    agent = live.fleet.agent("cpu-0")
    assert (live.home / "storage/cpu" / job).exists()
    assert agent.remove_all_files(live.service.agents.generation, [(job, 1)]) == [(job, 1)]
    assert not (live.home / "storage/cpu" / job).exists()

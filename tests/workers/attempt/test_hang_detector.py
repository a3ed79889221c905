"""Ranks that really stand still: found by their steps, or by output and CPU time; and those that only look like it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from workers.attempt.supervision import hang_detector
from workers.protocol import rank_progress
from workers.protocol.rank_progress import ProgressWriter

STANDS_STILL = """
import threading, time

def train(ctx):
    for step in range(1, 20):
        ctx.report(step=step, loss=0.5)
        if step == 9 and ctx.arguments.get("hangs", True):
            wait_for_a_sister()
        time.sleep(0.01)

def wait_for_a_sister():
    print("stands", flush=True)
    threading.Event().wait()
"""
EVALUATES = """
import time

def train(ctx):
    for step in range(1, 10):
        ctx.report(step=step, loss=0.5)
    until = time.monotonic() + 5
    while time.monotonic() < until:
        one()
        two()

def one():
    sum(range(300000))

def two():
    time.sleep(0.05)
"""


def test_a_training_that_stands_still_fails_as_a_hang_with_the_stacks_of_its_ranks(node):
    node.train(STANDS_STILL, hang_after_s=2.0)
    ended = node.outcome()
    failure = ended["failure"]
    assert (ended["state"], failure["kind"], failure["rank"], failure["node"]) == ("failed", "hang", 0, "n0"), failure
    assert failure["message"].startswith("rank 0 made no step for ")
    assert "the limit is 2 s (the last was step 9, 99 of 100 steps took at most " in failure["message"]
    assert "wait_for_a_sister" in failure["traceback"]
    log = node.text()
    assert "err [polyfleet: no progress; stacks of rank 0]" in log
    assert any("in wait_for_a_sister" in line for line in log)


def test_an_evaluation_that_nobody_announced_is_no_hang(node):
    node.train(EVALUATES, hang_after_s=1.0)
    ended = node.outcome()
    assert ended["state"] == "succeeded", ended["failure"]


def test_a_training_cancelled_while_it_stands_still_leaves_its_stacks_in_its_log(node):
    """As the other nodes of a gang are, when one of them found the hang first."""
    node.train(STANDS_STILL, hang_after_s=600.0)
    node.until_printed("stands")
    beat_at(node, 400.0)  # as if that had been long ago
    node.attempts.stop("j", 1, "cancel")
    assert node.outcome()["state"] == "cancelled"
    assert any("in wait_for_a_sister" in line for line in node.text())


def test_a_command_without_output_and_cpu_time_hangs_where_its_job_says_so(node):
    node.start(command=("sh", "-c", "echo hello; exec sleep 600"), hang_after_s=1.0)
    failure = node.outcome()["failure"]
    assert failure["kind"] == "hang"
    assert failure["message"].startswith("no rank printed anything or used CPU time for ")
    assert "sleep 600: S (sleeping)" in failure["traceback"]


@pytest.mark.parametrize("busy", ["while :; do echo x; sleep 0.2; done", "while :; do :; done"])
def test_a_command_that_prints_or_computes_does_not_hang(node, busy):
    node.start(command=("sh", "-c", f"({busy}) & sleep 3; kill $!"), hang_after_s=1.0)
    assert node.outcome()["state"] == "succeeded"


def test_a_command_may_be_silent_for_as_long_as_it_likes_unless_told_otherwise(node):
    for hang_after_s in (0.0, -1.0):
        watched = hang_detector.HangDetector(node.folder(), "run", hang_after_s)
        assert watched.check({os.getpid(): 0}) is None


@pytest.fixture
def watched(node, monkeypatch):
    """watched(hang_after_s) watches this process as rank 0 of a training, whose beats the test writes."""
    monkeypatch.setattr(hang_detector, "SAMPLE_S", 0.1)
    node.folder().shared.mkdir(parents=True)
    return lambda hang_after_s=0.0: hang_detector.HangDetector(node.folder(), "train", hang_after_s)


def beat_at(node, ago_s, steps=hang_detector.MIN_STEPS, p99_s=0.1, flags=0):
    at_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ago_s
    body = rank_progress.RECORD.pack(steps, at_s, p99_s, steps, 0, flags)
    node.folder().beat(0).write_bytes(body + rank_progress.CHECKSUM.pack(rank_progress.zlib.crc32(body)))


def hang_of(node, watching):
    """What it says, once it has taken its samples, of a process that does nothing."""
    with subprocess.Popen(["sleep", "600"]) as idle:
        said = []
        node.until(lambda: said.append(watching.check({idle.pid: 0})) or said[-1], "it has said something")
        idle.kill()
    return said[-1]


def test_the_default_limit_is_twice_the_99th_percentile_and_at_least_a_minute(node, watched):
    beat_at(node, 61.0)
    assert "the limit is 60 s" in hang_of(node, watched()).message
    beat_at(node, 61.0, p99_s=40.0)
    assert watched().check({os.getpid(): 0}) is None
    beat_at(node, 81.0, p99_s=40.0)
    assert "the limit is 80 s" in hang_of(node, watched()).message


@pytest.mark.parametrize("how", [{"steps": 4}, {"flags": rank_progress.PAUSED}, {"ago_s": 59.0}])
def test_a_rank_that_compiles_saves_or_evaluates_does_not_hang(node, watched, how):
    beat_at(node, **({"ago_s": 3600.0} | how))
    watching = watched()
    assert [watching.check({os.getpid(): 0}) for _ in range(3)] == [None] * 3
    assert not watching._stacks.is_sampling


def test_damaged_beats_are_none(node, watched):
    node.folder().beat(0).write_bytes(os.urandom(49))
    assert rank_progress.read(node.folder().beat(0)) is None
    assert watched().check({os.getpid(): 0}) is None


def test_beats_tell_the_99th_percentile_of_the_last_thousand_steps(node, watched, monkeypatch):
    told = ProgressWriter(node.folder().beat(0))
    clock = iter([*range(2000), *(2000 + 10 * i for i in range(1, 31))])
    monkeypatch.setattr(rank_progress.lease, "now_s", lambda: float(next(clock)))
    for step in range(2030):
        told.record_step("report", step)
    found = rank_progress.read(node.folder().beat(0))
    assert (found.steps, found.step, found.p99_s, found.paused) == (2030, 2029, 10.0, False)
    monkeypatch.setattr(rank_progress.lease, "now_s", lambda: 5000.0)
    with told.pause():
        assert rank_progress.read(node.folder().beat(0)).paused
    with told.saving():
        assert rank_progress.read(node.folder().beat(0)).saving
    assert rank_progress.read(node.folder().beat(0)).flags == 0


def test_in_a_gang_the_rank_that_is_furthest_behind_is_named_and_all_stacks_are_told(node, watched):
    beat_at(node, 70.0, steps=12)
    node.folder().beat(0).rename(node.folder().beat(1))
    beat_at(node, 61.0, steps=11)
    watching, said = watched(), []
    with subprocess.Popen(["sleep", "600"]) as first, subprocess.Popen(["sleep", "601"]) as second:
        ranks = {second.pid: 1, first.pid: 0}
        node.until(lambda: said.append(watching.check(ranks)) or said[-1], "it has said something")
        first.kill()
        second.kill()
    assert said[-1].message.startswith("rank 0 made no step for 6")
    assert sorted(said[-1].stacks) == [0, 1]
    assert "sleep 601" in said[-1].stacks[1]


def test_a_rank_that_somebody_stopped_is_named(node, watched):
    beat_at(node, 70.0, steps=12)
    watching, said = watched(), []
    with subprocess.Popen(["sleep", "600"]) as rank:
        rank.send_signal(signal.SIGSTOP)
        node.until(lambda: said.append(watching.check({rank.pid: 0})) or said[-1], "it has said something")
        rank.kill()
    assert f"; a signal has stopped its process {rank.pid}" in said[-1].message
    assert "sleep 600: T (stopped)" in said[-1].stacks[0]


def test_a_task_of_ours_without_steps_tells_its_python_stacks_where_its_job_sets_a_limit(node):
    node.folder().shared.mkdir(parents=True)
    code = f"""
import pathlib, time
from workers.tasks import rank_main
rank_main._register_stacks(pathlib.Path({str(node.folder().stacks(0))!r}))
def measures():
    time.sleep(600)
measures()
"""
    watching, said = hang_detector.HangDetector(node.folder(), "benchmark", 1.0), []
    with subprocess.Popen([sys.executable, "-c", code]) as rank:
        node.until(lambda: node.folder().stacks(0).exists(), "it listens")
        node.until(lambda: said.append(watching.check({rank.pid: 0})) or said[-1], "it has said something")
        rank.kill()
    assert "in measures" in said[-1].stacks[0]

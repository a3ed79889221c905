"""A column of a benchmark run whose agent goes away amid a call, over a session that really answers."""

import json
import socket
import threading

import pytest
from patience import LIMIT_S

from cluster.errors import FleetError
from orchestrator.benchmark.round_runner import SessionEnded
from orchestrator.core.jobs.fold import Attempt, Record
from orchestrator.core.model import Job
from orchestrator.core.states import State
from orchestrator.runtime.benchmarks.benchmark_target import FleetTarget
from workers.benchmark.session_server import ADDRESS, request, serve


class Agents:
    """Asks the session as the agent of a node does. Each time `killed` holds, the agent is killed amid the call."""

    def __init__(self, folder):
        self.folder, self.killed = folder, []
        self.facts, self.lost_reason = None, ""

    def __getitem__(self, node):
        return self

    get = __getitem__

    def call(self, node, method, job, epoch, message, limit_s, *, timeout_s):
        if self.killed and message["do"] == self.killed[-1]:
            self.killed.pop()
            with socket.socket(socket.AF_UNIX) as asking:
                asking.connect(json.loads((self.folder / ADDRESS).read_text())["socket"])
                asking.sendall(json.dumps(message).encode() + b"\n")
            raise FleetError("node a: measure: its agent has ended", "")
        return request(self.folder, message, limit_s)


@pytest.fixture
def jobs():
    attempt = Attempt(1, 0, "cpu", "cpu", (("a/cpu", (0,)),), 0.0)
    return {"j": Record(Job("j", "j", "benchmark", (), state=State.RUNNING, epoch=1), attempts=(attempt,))}


@pytest.fixture
def session(tmp_path):
    """What it was asked, "describe" left out."""
    asked = []

    def handle(message):
        if message["do"] != "describe":
            asked.append(message["do"])
        return {"host": "h", "device": {}, "said": message["do"], "times": len(asked)}

    serving = threading.Thread(target=serve, args=(tmp_path, handle, lambda: False), daemon=True)
    serving.start()
    while not (tmp_path / ADDRESS).exists():
        serving.join(0.01)
    yield asked
    request(tmp_path, {"do": "end"}, LIMIT_S)
    serving.join(LIMIT_S)
    assert not serving.is_alive()


def test_a_call_amid_which_the_agent_was_killed_is_made_again_in_the_same_session(tmp_path, session, jobs):
    opened, agents = [], Agents(tmp_path)
    column = FleetTarget("c", 0, "j", jobs, agents, opened.append)
    column.open()
    agents.killed = ["run"]
    assert column.call({"do": "run"}, LIMIT_S)["said"] == "run"
    assert session in (["run", "run"], ["run"]), "the first may have been lost on its way"
    assert opened == [column], "what was open still is"


def test_a_call_amid_which_the_agent_is_killed_twice_is_given_up_and_the_next_one_is_answered(tmp_path, session, jobs):
    agents = Agents(tmp_path)
    column = FleetTarget("c", 0, "j", jobs, agents, lambda column: None)
    column.open()
    agents.killed = ["prepare", "prepare"]
    with pytest.raises(SessionEnded, match="its agent has ended"):
        column.call({"do": "prepare"}, LIMIT_S)
    assert column.call({"do": "run"}, LIMIT_S)["said"] == "run"


def test_a_session_that_was_started_anew_has_nothing_open(tmp_path, session, jobs):
    """Its attempt ends amid the call, and the next one runs."""
    opened, agents = [], Agents(tmp_path)
    column = FleetTarget("c", 0, "j", jobs, agents, opened.append)
    column.open()
    first = jobs["j"]
    after = Attempt(2, 0, "cpu", "cpu", (("a/cpu", (0,)),), 0.0)
    jobs["j"] = Record(first.job, attempts=(*first.attempts, after))
    with pytest.raises(SessionEnded):
        column.call({"do": "run"}, LIMIT_S)
    assert opened == [column, column] and session == []
    assert column.call({"do": "prepare"}, LIMIT_S)["said"] == "prepare"

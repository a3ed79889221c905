"""What job code does to the files that its agent reads: it harms its own attempt at most, and is told."""

import dataclasses
import json
import os
import signal
import sys
import threading
import time
import uuid

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patience import LIMIT_S, wait_for

from orchestrator.core.model import Event
from orchestrator.store.events.event_store import EventStore
from workers.attempt.attempt import LocalAttempt
from workers.attempt.rank_files import RankFileReader
from workers.node.agent import Agent
from workers.protocol.folders import AttemptFolder, AttemptId
from workers.protocol.messages import Order, Outcome, RankEvent
from workers.protocol.rank_events import MAX_LINE_BYTES

START = "import json, os, time; here = os.environ['POLYFLEET_ATTEMPT_DIR']; os.chdir(here)\n"
RECORD = "os.chdir(here.replace('/shared/', '/attempts/'))\n"
STAY = "\nopen('done', 'w').close(); time.sleep(600)"
DEEP = "'[' * 100_000"


def tell(step: int) -> str:
    """Code that appends a report."""
    told = f"json.dumps({{'t': time.time(), 'rank': 0, 'type': 'report', 'step': {step}}})"
    return f"open('events.jsonl', 'a').write({told} + chr(10))"


class Node:
    """An agent and real supervisors. No call of it may hang."""

    def __init__(self, root):
        self.root = root
        self.agent = Agent(root / "node", root / "storage", "n0", "cpu", "cpu")
        self.cursors, self.known, self.told, self.outcomes, self.poison = {}, {}, {}, {}, {}

    def call(self, name, *arguments):
        answers = []
        asked = threading.Thread(target=lambda: answers.append(getattr(self.agent, name)(*arguments)), daemon=True)
        asked.start()
        asked.join(LIMIT_S)
        assert answers, f"the agent did not answer `{name}` within {LIMIT_S:.0f} s, or raised an exception"
        return answers[0]

    def start(self, job, code, **more):
        order = Order(
            job=job, epoch=1, task="run", backend="cpu", kind="cpu", emulated=False, devices=(0,), node_rank=0, nodes=1,
            first_rank=0, ranks=1, world_size=1, master_address="127.0.0.1", master_port=29500, lease_s=600.0,
            command=(sys.executable, "-S", "-c", START + code),
        )  # fmt: skip
        self.agent.start(1, dataclasses.replace(order, **more).to_plain(), {})

    def watch(self, timeout_s=0.2):
        """One watch, as a controller asks for it."""
        answer = self.call("poll", 1, self.cursors, self.known, timeout_s)
        self.poison |= answer.get("unreadable_output", {})
        for report in answer["reports"]:
            key = f"{report['job']}.1.0"
            self.cursors[key], self.known[key] = report["cursor"], report["phase"]
            self.told.setdefault(report["job"], []).extend(report["events"])
            if report["outcome"]:
                self.outcomes[report["job"]] = report["outcome"]
        return answer

    def until(self, true, what):
        wait_for(lambda: true() or (self.watch() and true()), lambda: f"{what}; {self.outcomes} {self.poison}")

    def ended(self, job):
        self.until(lambda: job in self.outcomes, f"{job} ended")
        return self.outcomes[job]

    def in_place(self, job):
        """Its code has done what it wanted to, and stays."""
        self.until(
            AttemptFolder(self.root / f"node/attempts/{job}.1.0").shared.joinpath("done").exists, f"{job} is done"
        )

    def stays_running(self, job):
        """What its code did has not ended it. A report from its start may be the newest so far."""
        self.until(lambda: self.known.get(f"{job}.1.0", "starting") != "starting", f"{job} is running")
        assert self.known[f"{job}.1.0"] == "running"

    def probe(self, name="probe"):
        """An honest neighbour runs, tells and ends."""
        self.start(name, tell(7))
        assert self.ended(name)["state"] == "succeeded"
        assert [event["data"]["step"] for event in self.told[name]] == [7]

    def close(self):
        for key in self.agent.poll(1, {}, {}, 0.0)["attempts"]:
            job = key.rsplit(".", 2)[0]
            self.agent.stop(1, job, 1, "cancel")
            self.ended(job)


@pytest.fixture
def node(tmp_path):
    it = Node(tmp_path)
    yield it
    it.close()


def failed_as_unreadable(outcome, *words):
    assert (outcome["state"], outcome["failure"]["kind"]) == ("failed", "unreadable"), outcome
    assert all(word in outcome["failure"]["message"] for word in words), outcome["failure"]
    return True


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("os.mkfifo('events.jsonl')", "is not a regular file"),
        ("os.mkdir('events.jsonl')", "is not a regular file"),
        ("os.symlink('/dev/zero', 'events.jsonl')", "cannot be opened"),
        ("os.symlink('order.json', 'events.jsonl')", "cannot be opened"),
        ("os.rename(here, here + '-x'); os.symlink(here + '-x', here); os.chdir(here)", "is not a folder"),
    ],
)  # fmt: skip
def test_events_that_are_no_file_fail_their_attempt_and_no_other(node, code, why):
    node.start("culprit", f"{code}{STAY}")
    assert failed_as_unreadable(node.ended("culprit"), "events.jsonl", why)
    assert node.poison["culprit.1.0"]["reason"].startswith("events.jsonl")
    node.probe()


def event(**fields):
    return {"t": "NOW", "rank": 0, "type": "report", "step": 1} | fields


CHECKPOINT = {"type": "checkpoint", "path": "/x"}
BAD_LINES = {
    "nested": "[" * 50_000,
    "nested in an event": '{"t": NOW, "rank": 0, "type": "report", "step": 1, "x": ' + "[" * 50_000,
    "a string that never ends": '"' + '\\"' * 30_000,
    "text": "not json",
    "a list": "[1]",
    "nothing of an event": "{}",
    "NaN": json.dumps(event(t=float("nan"), **CHECKPOINT)),
    "Infinity": json.dumps(event(t=float("inf"), **CHECKPOINT)),
    "beyond floats": json.dumps(event(t=10**400, **CHECKPOINT)),
    "beyond floats, written short": json.dumps(event(**CHECKPOINT)).replace('"NOW"', "1e999"),
    "before its attempt": json.dumps(event(t=-1.0)),
    "in the year 9999": json.dumps(event(t=253_370_764_801.0)),
    "time as text": json.dumps(event(t="now")),
    "time as truth": json.dumps(event(t=True)),
    "rank as truth": json.dumps(event(rank=False)),
    "a step below 0": json.dumps(event(step=-1)),
    "a step as text": json.dumps(event(step="7")),
    "a step beyond 64 bits": json.dumps(event(step=2**70)),
    "a step of no number": json.dumps(event(step=float("inf"))),
    "an unknown type": json.dumps(event(type="weird")),
    "a type that is a list": json.dumps(event(type=["report"])),
    "a value with a tree": json.dumps(event(loss={"a": [1]})),
    "a value beyond 64 bits": json.dumps(event(loss=2**64)),
    "half a character": json.dumps(event(loss="x")).replace('"x"', '"\\ud800"'),
    "a name of half a character": json.dumps(event(x=1)).replace('"x"', '"\\udfff"'),
    "a checkpoint without a path": json.dumps(event(type="checkpoint")),
    "a path of 5000 characters": json.dumps(event(type="checkpoint", path="x" * 5000)),
    "a path with a zero": json.dumps(event(type="checkpoint", path="a\0b")),
    "bytes of no number": json.dumps(event(bytes=float("nan"), **CHECKPOINT)),
    "no text": "\udcff\udcfe",
    "twice the longest": json.dumps(event(loss="x" * 2 * MAX_LINE_BYTES)),
}


def test_each_bad_line_is_refused_counted_and_followed_by_the_next(node):
    text = "".join(f"{line}\n" for line in BAD_LINES.values()).replace('"NOW"', "NOW")
    (node.root / "lines").write_text(text, errors="surrogateescape")
    read = f"open({str(node.root / 'lines')!r}, errors='surrogateescape').read()"
    code = f"text = {read}.replace('NOW', str(time.time()))\n"
    good = '{"t": %f, "rank": 0, "type": "report", "step": 8, "loss": 0.5, "loss": 0.25}\\n'
    code += f"open('events.jsonl', 'a', errors='surrogateescape').write(text + '{good}' % time.time())"
    node.start("culprit", code + STAY)
    node.in_place("culprit")
    node.probe()
    node.until(lambda: node.told.get("culprit"), "the good event")
    assert [e["data"] for e in node.told["culprit"]] == [{"step": 8, "loss": 0.25}]
    node.until(lambda: node.poison["culprit.1.0"]["count"] == len(BAD_LINES), "all are counted")
    node.stays_running("culprit")
    node.cursors.pop("culprit.1.0")
    node.watch()
    assert node.poison["culprit.1.0"]["count"] == len(BAD_LINES), "a new server asks again: nothing counts twice"


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_alone_never_becomes_an_event(line, tmp_path):
    folder = folder_of(tmp_path)
    folder.events.write_text(line.replace('"NOW"', str(time.time())) + "\n", errors="surrogateescape")
    reader = RankFileReader(folder)
    assert reader.events(0, 10, 4 * MAX_LINE_BYTES).events == []
    assert reader.unusable_count == 1, reader.reason


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("open('result.json', 'w').write('{')", "is not JSON"),
        ("open('result.json', 'w').write('[1]')", "is not a JSON object"),
        (f"open('result.json', 'w').write({DEEP})", "is nested more than 32 times"),
        ("open('result.json', 'w').write('{\"a\": NaN}')", "NaN is not a number"),
        ("open('result.json', 'w').write('{\"a\": \"%s\"}' % ('x' * (5 << 20)))", "is longer than the limit"),
        ("os.mkdir('result.json')", "is not a regular file"),
        ("os.mkfifo('result.json')", "is not a regular file"),
        ("os.symlink('/dev/zero', 'result.json')", "cannot be opened"),
    ],
)  # fmt: skip
def test_a_result_that_cannot_be_read_fails_its_attempt_once_and_for_all(node, code, why):
    node.start("culprit", code)
    assert failed_as_unreadable(node.ended("culprit"), "result.json", why)
    node.probe()


@pytest.mark.parametrize("code", [f"open('failure-0.json', 'w').write({DEEP})", "os.mkfifo('failure-0.json')"])
def test_a_failure_that_cannot_be_read_leaves_the_exit_code(node, code):
    node.start("culprit", f"{code}; raise SystemExit(3)")
    ended = node.ended("culprit")
    assert (ended["state"], ended["exit_codes"], ended["failure"]["kind"]) == ("failed", {"0": 3}, "user")


def test_a_failure_told_by_user_code_has_a_kind_and_a_length_of_ours(node):
    told = "{'kind': 'launch', 'message': 'x' * 500_000, 'traceback': ['no', 'text'], 'rank': 'zero'}"
    node.start("culprit", f"json.dump({told}, open('failure-0.json', 'w')); raise SystemExit(1)")
    failure = node.ended("culprit")["failure"]
    assert (failure["kind"], len(failure["message"]), failure["rank"]) == ("user", 64 << 10, 0)


OUTCOME = "{'job': 'culprit', 'epoch': 1, 'node_rank': 0, 'state': 'weird', 'exit_codes': {}}"


def put(text):
    """Whole at once: the agent may read the file at any moment. `text` is an expression."""
    return f"open('new', 'w').write({text}); os.rename('new', 'outcome.json')"


WEIRD = put(f"json.dumps({OUTCOME})")


@pytest.mark.parametrize("code", ["os.mkfifo('outcome.json')", "os.mkdir('outcome.json')", WEIRD])
def test_an_outcome_put_where_ranks_write_has_no_effect_and_is_told(node, code):
    node.start("culprit", f"{code}{STAY}")
    node.in_place("culprit")
    node.until(lambda: "culprit.1.0" in node.poison, "it is told")
    assert node.poison["culprit.1.0"]["reason"] == "outcome.json was put where ranks write; it has no effect"
    node.stays_running("culprit")
    node.probe()


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("os.mkfifo('outcome.json')", "not a regular file"),
        ("os.mkdir('outcome.json')", "not a regular file"),
        (WEIRD, "has the state 'weird'"),
        (put(DEEP), "is nested"),
        (WEIRD.replace("'weird', 'exit_codes': {}", "'failed', 'exit_codes': {'0': 'x'}"), "exit codes"),
        (WEIRD.replace("culprit", "probe"), "is not the outcome of culprit.1.0"),
    ],
)
def test_an_outcome_put_into_the_agents_own_record_fails_the_attempt(node, code, why):
    """Code of the same user that guesses where the record lies."""
    node.start("culprit", f"{RECORD}{code}\nos.chdir(here){STAY}")
    assert failed_as_unreadable(node.ended("culprit"), "outcome.json", why)
    node.probe()
    node.agent = Agent(node.root / "node", node.root / "storage", "n0", "cpu", "cpu")
    node.outcomes.clear()
    node.known.clear()
    assert failed_as_unreadable(node.ended("culprit"), "outcome.json"), "a restarted agent says the same"


def test_a_line_of_ten_gigabytes_and_what_follows_it_cost_nothing(node):
    code = "f = open('events.jsonl', 'a'); f.truncate(10 << 30); f.close()\n"
    node.start("culprit", f"{code}open('events.jsonl', 'a').write(chr(10)); {tell(3)}{STAY}")
    node.in_place("culprit")
    node.probe()
    node.until(lambda: node.cursors.get("culprit.1.0", 0) > 10 << 30, "it is skipped")
    assert "longer than 65536 bytes" in node.poison["culprit.1.0"]["reason"]
    assert node.poison["culprit.1.0"]["count"] <= 2


def test_a_flood_of_events_gets_its_share_and_neighbours_theirs(node):
    line = '{"t": %f, "rank": 0, "type": "report", "step": 1}\\n'
    node.start("culprit", f"text = '{line}' % time.time() * 60_000; open('events.jsonl', 'a').write(text){STAY}")
    node.in_place("culprit")
    node.start("steady", f"{tell(1)}{STAY}")
    node.in_place("steady")
    node.until(lambda: node.told.get("steady"), "the neighbour's event")
    answer = node.watch()
    assert all(len(report["events"]) <= 2000 for report in answer["reports"])
    assert len(node.told["culprit"]) < 60_000, "the neighbour was heard before the flood ended"
    node.probe()


def test_an_attempt_that_ends_tells_its_last_events_first(node):
    line = '{"t": %f, "rank": 0, "type": "report", "step": %d}\\n'
    node.start("quick", f"open('events.jsonl', 'a').write(''.join('{line}' % (time.time(), i) for i in range(9000)))")
    assert node.ended("quick")["state"] == "succeeded"
    assert [event["data"]["step"] for event in node.told["quick"]] == list(range(9000))


def test_an_attempt_that_ends_in_a_flood_ends_all_the_same(node):
    code = "f = open('events.jsonl', 'a')\nfor _ in range(2): f.write('{}\\n' * 1_000_000)"
    node.start("culprit", code)
    assert node.ended("culprit")["state"] == "succeeded"
    assert "was not read to its end" in node.poison["culprit.1.0"]["reason"]


@pytest.mark.parametrize("code", ["import shutil; shutil.rmtree(here)", "os.rename(here, here + '-away')"])
def test_without_its_folder_a_job_goes_on_without_events(node, code):
    node.start("culprit", f"{code}; os.chdir('/'); print('on', flush=True); time.sleep(600)")
    log = node.root / "node/attempts/culprit.1.0/rank-0.log"
    node.until(lambda: log.exists() and "on" in log.read_text(), "it goes on")
    node.probe()
    node.stays_running("culprit")


def test_a_file_that_becomes_shorter_is_told_and_read_on(node):
    code = f"{tell(1)}; {tell(2)}\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
    code += "os.truncate('events.jsonl', 0)\nwhile not os.path.exists('on'): time.sleep(0.01)\n"
    node.start("culprit", f"{code}{tell(3)}{STAY}")
    shared = node.root / "node/shared/culprit.1.0"
    node.until(lambda: len(node.told.get("culprit", ())) == 2, "two events")
    (shared / "go").touch()
    node.until(lambda: "culprit.1.0" in node.poison, "it is noticed")
    assert "events.jsonl was cut" in node.poison["culprit.1.0"]["reason"]
    (shared / "on").touch()
    node.until(lambda: len(node.told["culprit"]) == 3, "it is read on")
    assert [event["data"]["step"] for event in node.told["culprit"]] == [1, 2, 3]


def test_what_cannot_be_looked_at_stops_no_other_attempt(node):
    """A cursor of nonsense stands for any mistake of ours in what we make of one attempt's files."""
    node.start("culprit", f"{tell(1)}{STAY}")
    node.in_place("culprit")
    node.cursors["culprit.1.0"] = "nonsense"
    assert failed_as_unreadable(node.ended("culprit"), "cannot be processed")
    node.probe()


def test_a_folder_of_two_thousand_nested_folders_is_removed_without_waiting(node):
    node.start("culprit", "os.chdir('work')\nfor _ in range(2000): os.mkdir('d'); os.chdir('d')")
    assert node.ended("culprit")["state"] == "succeeded"
    node.agent.remove_shared_files(1, "culprit", 1)
    assert node.watch()["attempts"] == []
    assert not (node.root / "node/shared/culprit.1.0").exists()
    node.until(lambda: not list((node.root / "node/shared").iterdir()), "it is removed")


def test_a_supervisor_killed_over_a_folder_in_place_of_its_outcome_leaves_an_end(node):
    node.start("culprit", STAY)
    node.in_place("culprit")
    record = node.root / "node/attempts/culprit.1.0"
    (record / "outcome.json").mkdir()
    os.kill(json.loads((record / "supervisor.json").read_text())["pid"], signal.SIGKILL)
    assert failed_as_unreadable(node.ended("culprit"), "outcome.json")
    node.agent.remove_shared_files(1, "culprit", 1)
    node.probe()


@pytest.mark.skipif(os.getuid() != 0, reason="another user is needed for whom a mode means something")
def test_a_folder_that_nobody_may_enter_is_unreadable(tmp_path):
    folder = folder_of(tmp_path)
    folder.events.write_text("{}\n")
    tmp_path.chmod(0o755)
    for above in list(tmp_path.parents)[:2]:
        above.chmod(0o755)
    folder.shared.chmod(0o000)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.setuid(65534)
        try:
            RankFileReader(folder).events(0, 10, 1000)
        except Exception as e:
            os.write(writing, f"{type(e).__name__} {e}".encode())
        os._exit(0)
    os.close(writing)
    told = os.read(reading, 10_000).decode()
    os.waitpid(child, 0)
    assert "Unreadable" in told
    assert "Permission denied" in told


def folder_of(root):
    folder = AttemptFolder(root / "attempts" / "j.1.0")
    folder.path.mkdir(parents=True)
    folder.shared.mkdir(parents=True)
    folder.order.write_text("{}")
    return folder


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)
OBJECTS = st.dictionaries(st.sampled_from(["t", "rank", "type", "step", "path", "bytes", "loss", "state"]), VALUES)
REPORTS = st.fixed_dictionaries(
    {
        "t": st.just(time.time()) | VALUES,
        "rank": st.just(0) | VALUES,
        "type": st.sampled_from(["report", "checkpoint"]),
    },
    optional={"step": st.integers() | VALUES, "path": st.text() | VALUES, "bytes": VALUES, "loss": VALUES},
)
LINES = st.binary(max_size=200) | (OBJECTS | REPORTS).map(lambda value: json.dumps(value).encode())


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    it = EventStore(f"sqlite:///{tmp_path_factory.mktemp('store') / 'db'}")
    yield it
    it.close()


OUTCOMES = st.fixed_dictionaries(
    {"job": st.just("j"), "epoch": st.just(1), "node_rank": st.just(0), "state": st.sampled_from(["failed", "weird"])},
    optional={"exit_codes": st.just({"0": 1}) | VALUES, "failure": VALUES, "result": VALUES, "ended_s": VALUES},
).map(lambda value: json.dumps(value).encode())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(LINES, max_size=6), LINES, LINES | OUTCOMES)
def test_no_bytes_in_any_file_raise_hang_or_are_stored_badly(tmp_path, store, events, result, outcome):
    folder = folder_of(tmp_path / uuid.uuid4().hex)
    folder.events.write_bytes(b"\n".join(events) + b"\n")
    folder.result.write_bytes(result)
    folder.outcome.write_bytes(outcome)
    attempt, cursor = LocalAttempt(AttemptId("j", 1, 0), folder, 1.0), 0
    while cursor < folder.events.stat().st_size:
        attempt.check_supervisor()
        told = attempt.status_if_changed(cursor, "", 100, 1 << 20)
        assert told is not None
        if attempt.unreadable:
            break
        cursor = told.cursor
        for found in told.events:
            plain = json.loads(json.dumps(found.to_plain(), allow_nan=False))
            assert RankEvent.parse(plain) == found
            store.append([Event("j", found.type, 1, found.t, plain)])
            assert store.events_of("j")[-1].data == plain
    ended = attempt.outcome
    assert ended is None or Outcome.parse_for(("j", 1, 0), ended.to_plain()) == ended

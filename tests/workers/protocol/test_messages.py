"""Messages are read strictly by the code that writes them: what was built is read back, all else is refused."""

import json
import math
import subprocess
import sys
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.protocol.failure_kinds import FAILURE_KINDS
from workers.protocol.messages import AttemptStatus, Failure, InvalidMessage, Order, Outcome, RankEvent

ORDER = Order(
    job="j", epoch=3, task="run", backend="cpu", kind="cpu", emulated=False, devices=(0, 2), node_rank=1, nodes=2,
    first_rank=1, ranks=1, world_size=2, master_address="127.0.0.1", master_port=29500, command=("sh", "-c", "true"),
    arguments={"a": [1, None]}, environment={"A": "1"}, visibility_names={"0": "GPU-1"}, seed=7, grace_s=5,
)  # fmt: skip
FAILURE = Failure(1, "cpu-0", "oom", "rank 1 was killed", "trace", -9)
OUTCOME = Outcome("j", 3, 1, "failed", {1: -9, 0: 0}, FAILURE, {"loss": 0.5}, 1.7e9, 4096)
EVENTS = (
    RankEvent("report", 0, 1.7e9, 80, {"step": 1, "loss": 0.5, "note": None}),
    RankEvent("checkpoint", 0, 1.7e9, 160, {"step": 1, "path": "/s/j/step-1", "bytes": 9, "seconds": 0.1}),
)
RUNNING = AttemptStatus("j", 3, 1, "running", EVENTS, 160)
ENDED = AttemptStatus("j", 3, 1, "ended", (), 160, OUTCOME)
MESSAGES = (ORDER, FAILURE, OUTCOME, *EVENTS, RUNNING, ENDED)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_what_was_built_is_read_back_from_json(message):
    assert type(message).parse(json.loads(json.dumps(message.to_plain(), allow_nan=False))) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("data", [None, 7, "text", [], {}, {"job": "j"}])
def test_what_is_no_such_message_is_refused(message, data):
    with pytest.raises(InvalidMessage, match=r"^(is no|has )"):
        type(message).parse(data)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_field_that_a_message_does_not_have_is_refused(message):
    with pytest.raises(InvalidMessage, match="has the unknown field 'extra'"):
        type(message).parse({**message.to_plain(), "extra": 1})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(st.sampled_from(MESSAGES), st.data())
def test_any_value_in_any_field_is_refused_or_makes_a_message_that_json_holds(message, data):
    name = data.draw(st.sampled_from([f.name for f in fields(message)]))
    try:
        read = type(message).parse({**message.to_plain(), name: data.draw(VALUES)})
    except InvalidMessage as e:
        assert str(e).startswith(("is no", "has "))
        return
    if name not in ("arguments", "result") and not (isinstance(read, RankEvent) and read.type == "phase"):
        assert type(message).parse(json.loads(json.dumps(read.to_plain(), allow_nan=False))) == read


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"epoch": True}, "has no `epoch` that is an integer"),
        ({"epoch": -1}, "has no `epoch`"),
        ({"lease_s": math.nan}, "has no `lease_s`"),
        ({"lease_s": 1e9}, "has no `lease_s` that is a finite number from 0 to 86400"),
        ({"devices": [0, "1"]}, "has devices that are not integers"),
        ({"command": [1]}, "has a `command` that is neither"),
        ({"environment": {"A": 1}}, "has a value in `environment` that is not text"),
        ({"master_port": 65_536}, "has no `master_port`"),
    ],
)
def test_an_order_is_refused_with_its_field(change, why):
    with pytest.raises(InvalidMessage, match=why):
        Order.parse(ORDER.to_plain() | change)


def test_a_command_in_one_text_is_run_by_a_shell():
    assert Order.parse(ORDER.to_plain() | {"command": "exit 3"}).command == ("/bin/sh", "-c", "exit 3")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"state": "weird"}, "has the state 'weird', which is none of succeeded, failed"),
        ({"exit_codes": {"0": "zero"}}, "has exit codes that are not integers by rank"),
        ({"exit_codes": [0]}, "has no `exit_codes` that is an object"),
        ({"failure": {"kind": "memory"}}, "has a failure that has the kind 'memory'"),
        ({"failure": {"kind": "user", "message": 7}}, "has a failure that has a `message` that is not text"),
        ({"result": [1]}, "has no `result` that is an object"),
        ({"peak_memory_bytes": 1.5}, "has no `peak_memory_bytes`"),
        ({"ended_s": math.inf}, "has no `ended_s`"),
    ],
)
def test_an_outcome_is_refused_with_its_field(change, why):
    with pytest.raises(InvalidMessage, match=why):
        Outcome.parse(OUTCOME.to_plain() | change)


def test_an_outcome_of_another_part_is_none_of_this_one():
    assert Outcome.parse_for(("j", 3, 1), OUTCOME.to_plain()) == OUTCOME
    with pytest.raises(InvalidMessage, match=r"is not the outcome of j\.4\.1"):
        Outcome.parse_for(("j", 4, 1), OUTCOME.to_plain())


def test_a_report_has_an_outcome_when_its_attempt_has_ended_and_only_then():
    with pytest.raises(InvalidMessage, match="has ended without an outcome"):
        AttemptStatus.parse(replace(ENDED, outcome=None).to_plain())
    with pytest.raises(InvalidMessage, match="has an outcome in the phase running"):
        AttemptStatus.parse(replace(ENDED, phase="running").to_plain())
    with pytest.raises(InvalidMessage, match=r"is not the outcome of j\.4\.1"):
        AttemptStatus.parse(replace(ENDED, epoch=4).to_plain())


def test_a_line_of_a_rank_is_an_event_that_says_where_it_ends():
    line = json.dumps({"t": 5.0, "rank": 0, "type": "report", "step": 1, "at": 7, "data": "x"}).encode()
    assert RankEvent.from_line(line, 99, 0.0, 9.0) == RankEvent("report", 0, 5.0, 99, {"step": 1, "at": 7, "data": "x"})
    assert RankEvent.from_line(line, 99, 6.0, 9.0).t == 6.0, "a clock that was set meanwhile is no fault of its line"
    with pytest.raises(InvalidMessage, match="has the time -5, which is not a date"):
        RankEvent.from_line(line.replace(b"5.0", b"-5"), 99, 6.0, 9.0)


def test_every_kind_of_failure_can_be_told():
    assert "memory" not in FAILURE_KINDS
    assert [Failure.parse(replace(FAILURE, kind=kind).to_plain()).kind for kind in FAILURE_KINDS] == list(FAILURE_KINDS)


def test_messages_are_read_with_the_standard_library_alone():
    """A supervisor starts without site-packages."""
    code = (
        "import workers.protocol.messages, sys; print([m for m in sys.modules if m.startswith(('pydantic', 'psutil'))])"
    )
    ran = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"

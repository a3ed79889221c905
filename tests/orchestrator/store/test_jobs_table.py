"""The rows of jobs are what the log folds to, in memory and in the database, whatever was written in what groups."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.jobs.fold import apply, fold, submitted
from orchestrator.core.model import Candidate, Event, Job, Recovery
from orchestrator.core.states import TERMINAL
from orchestrator.store.events.event_store import EventStore
from orchestrator.store.rows import record_codec
from orchestrator.store.rows.damaged_rows import DamagedDataError
from orchestrator.store.rows.job_cache import is_open

NAMES = ("a", "b", "c", "node/n")
WORDS = ("submitted", "placed", "started", "preempted", "finished", "failed", "interrupted", "cancelled", "released")
LEASES = [["cpu-0/cpu", [0]]]
DATA = {
    "placed": {"candidate": 0, "kind": "cpu", "pool": "cpu", "leases": LEASES, "reason": "fits"},
    "finished": {"reason": "done", "result": {"loss": float("nan"), "pair": (1, 2)}},
    "interrupted": {"reason": "lost", "restarts": 0, "interruptions": 1, "failure": {"kind": "lost"}},
    "checkpoint": {"pool": "cpu", "path": "x/step-1", "step": 1},
    "replicated": {"pool": "cpu", "path": "x/step-1", "step": 1, "node": "b"},
    "unreplicated": {"step": 1, "reason": "no space"},
    "resumed": {"step": 1},
    "drained": {"reason": "asked"},
}


def job_of(name):
    wanted = Candidate(("cpu",), environment={"A": "\u00e9"}, command=("true",), arguments={"deep": [1.5, None, {}]})
    return Job(name, name[0], "run", (wanted,), submitted_s=1.5, recovery=Recovery(retry_exit_codes=(3, 4)))


def event_of(name, word, epoch):
    if word == "submitted" and "/" not in name:
        return submitted(job_of(name), {"command": "true"}, 1.0)
    return Event(name, word, epoch, 2.0 + epoch, DATA.get(word, {"reason": "asked"}))


events = st.builds(event_of, st.sampled_from(NAMES), st.sampled_from((*WORDS, *DATA)), st.integers(0, 3))
events = events.filter(lambda event: (event.job, event.event) != ("node/n", "submitted"))
LIFE = ("submitted", "placed", "started", "interrupted", "placed", "started", "checkpoint", "finished")


def life_of(name, length):
    """A job's own events, in the order in which they count."""
    epochs = (0, 1, 1, 1, 2, 2, 2, 2)
    return [event_of(name, word, epoch) for word, epoch in zip(LIFE[:length], epochs, strict=False)]


lives = st.tuples(st.sampled_from("abc"), st.integers(1, len(LIFE))).map(lambda pair: life_of(*pair))
logs = st.lists(st.one_of(lives, st.lists(events, max_size=4)), max_size=8)


def as_read(event):
    return replace(event, data=record_codec.json_of(record_codec.text_of(event.data)))


def told(store, names=NAMES):
    return {name: record for name in names if (record := store.jobs.get(name))}


@settings(max_examples=40, deadline=None)
@given(logs, st.integers(0, 8))
def test_memory_rows_and_replay_tell_the_same_after_any_events(tmp_path_factory, groups, restart):
    """I8: snapshot + tail = whole replay = fold of the log; a restart in between makes no difference."""
    path = tmp_path_factory.mktemp("store") / "polyfleet.db"
    store, model, seq = EventStore(f"sqlite:///{path}"), {}, 0
    for number, group in enumerate(groups):
        if number == restart:
            store.close()
            store = EventStore(f"sqlite:///{path}")
        store.append(group)
        for event in group:
            seq += 1
            counts = "/" not in event.job and (event.job in model or event.event == "submitted")
            if counts and (after := apply(model.get(event.job), replace(as_read(event), seq=seq))):
                model[event.job] = after
    assert told(store) == model == fold(store.read(0))
    assert [r.job.id for r in store.jobs.open()] == [name for name, record in model.items() if is_open(record)]
    assert store.differences() == []
    store.close()
    again = EventStore(f"sqlite:///{path}")
    assert told(again) == model
    assert [r.job.id for r in again.jobs.open()] == [name for name, record in model.items() if is_open(record)]
    again.close()


@settings(max_examples=40, deadline=None)
@given(st.lists(events, max_size=12))
def test_a_group_is_taken_whole_when_each_event_counts_and_not_at_all_otherwise(tmp_path_factory, group):
    path = tmp_path_factory.mktemp("store") / "polyfleet.db"
    store = EventStore(f"sqlite:///{path}")
    store.append([event_of("a", "submitted", 0)], strict=True)
    before, record, counts = told(store), {"a": store.jobs.get("a")}, True
    for event in group:
        if event.job.startswith("node/"):
            continue
        after = apply(record.get(event.job), as_read(event))
        counts = counts and after is not record.get(event.job) and after is not None
        record[event.job] = after
    try:
        store.append(group, strict=True)
        assert counts
    except Exception:
        assert not counts
        assert (store.last_seq, told(store)) == (1, before)
    assert store.differences() == []
    store.close()


odd = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), odd, max_size=4))
def test_any_plain_data_of_a_record_comes_back_as_it_was(data):
    record = fold([as_read(e) for e in life_of("a", 8)])["a"]
    whole = replace(record, result=data, job=replace(record.job, candidates=(Candidate(("cpu",), arguments=data),)))
    text = record_codec.encode_record(whole)
    assert record_codec.decode_record(text, record_codec.checksum(text)) == whole


def test_a_row_has_no_field_with_its_default():
    record = fold([as_read(event) for event in life_of("a", 1)])["a"]
    text = record_codec.encode_record(record)
    row = record_codec.json_of(text)
    assert set(row) == {"job", "reason"}
    assert set(row["job"]) == {"id", "name", "task", "candidates", "submitted_s", "recovery"}
    assert row["job"]["recovery"] == {"retry_exit_codes": [3, 4]}
    assert record_codec.decode_record(text, record_codec.checksum(text)) == record


def test_what_was_not_written_as_a_record_is_damaged():
    for text in ("{}", "[", "7", "null"):
        with pytest.raises(DamagedDataError, match="is not a record"):
            record_codec.decode_record(text, record_codec.checksum(text))
    with pytest.raises(DamagedDataError, match="checksum"):
        record_codec.decode_record("{}", 0)


def test_a_text_that_is_not_unicode_is_kept(tmp_path):
    store = EventStore(f"sqlite:///{tmp_path / 'polyfleet.db'}")
    store.append([*life_of("a", 7), Event("a", "finished", 2, 9.0, {"result": {"half": "\ud800"}})], strict=True)
    store.close()
    again = EventStore(f"sqlite:///{tmp_path / 'polyfleet.db'}")
    assert again.jobs.get("a").result == {"half": "\ud800"} and again.jobs.get("a").job.state in TERMINAL
    assert again.differences() == [] and again.damage.count == 0
    again.close()

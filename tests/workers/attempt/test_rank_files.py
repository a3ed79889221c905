"""Reading what ranks write: what is skipped, what waits, and who is to blame."""

import json
import resource
import time
from contextlib import contextmanager

import pytest

from workers.attempt.attempt import LocalAttempt
from workers.attempt.rank_files import EventBatch, RankFileReader
from workers.protocol.folders import AttemptFolder, AttemptId
from workers.protocol.messages import Outcome
from workers.protocol.rank_events import MAX_LINE_BYTES

ID = AttemptId("j", 1, 0)


@pytest.fixture
def folder(tmp_path):
    it = AttemptFolder(tmp_path / "attempts" / str(ID))
    it.path.mkdir(parents=True)
    it.shared.mkdir(parents=True)
    it.order.write_text("{}")
    return it


YEAR_S = 365 * 86_400.0


def line(step, kind="report", later_s=0.0):
    t = time.time() + later_s
    return json.dumps({"t": t, "rank": 0, "type": kind, "step": step, "path": "/x"}).encode() + b"\n"


def steps(piece):
    return [event.data["step"] for event in piece.events]


def test_a_line_without_an_end_waits_for_it(folder):
    reader, whole = RankFileReader(folder), line(1)
    folder.events.write_bytes(whole + line(2)[:9])
    assert steps(reader.events(0, 9, 9999)) == [1]
    assert reader.events(len(whole), 9, 9999) == EventBatch([], len(whole), False)
    folder.events.write_bytes(whole + line(2))
    assert steps(reader.events(len(whole), 9, 9999)) == [2]
    assert reader.unusable_count == 0


def test_nothing_is_lost_where_the_clock_was_set_by_years_meanwhile(folder):
    """Its time is drawn to that of the attempt: nobody is shown a report of ten years ago."""
    reader = RankFileReader(folder)
    folder.events.write_bytes(line(1) + line(2, later_s=-10 * YEAR_S) + line(3, "checkpoint", 10 * YEAR_S))
    piece = reader.events(0, 9, 9999)
    assert (steps(piece), reader.unusable_count) == ([1, 2, 3], 0)
    assert all(abs(event.t - time.time()) < YEAR_S for event in piece.events)


def test_more_is_told_as_long_as_whole_lines_are_left(folder):
    reader = RankFileReader(folder)
    folder.events.write_bytes(b"".join(map(line, range(3))))
    piece = reader.events(0, 2, 9999)
    assert (steps(piece), piece.more) == ([0, 1], True)
    piece = reader.events(piece.cursor, 2, 9999)
    assert (steps(piece), piece.more) == ([2], False)
    assert reader.events(0, 9, len(line(0)) + 3).more


def test_notes_are_no_news_and_blank_lines_no_fault(folder):
    reader = RankFileReader(folder)
    folder.events.write_bytes(b"\n \n" + line(1, "note") + line(2, "checkpoint"))
    assert steps(reader.events(0, 9, 9999)) == [2]
    assert reader.unusable_count == 0


def test_a_line_longer_than_any_is_skipped_to_the_end_of_the_file(folder):
    reader = RankFileReader(folder)
    size = folder.events.write_bytes(b"x" * 3 * MAX_LINE_BYTES)
    assert reader.events(0, 9, 2 * MAX_LINE_BYTES) == EventBatch([], size, False)
    assert reader.unusable_count == 1


def test_a_result_is_judged_once_it_is_no_longer_written(folder):
    reader = RankFileReader(folder)
    folder.result.write_text("{")
    reader.check_files()
    assert reader.unusable_count == 0, "it may be amid being written"
    reader.check_files()
    reader.check_files()
    assert (reader.unusable_count, reader.reason[:11]) == (1, "result.json")
    folder.result.write_text('{"loss": 1}')
    reader.check_files()
    reader.check_files()
    assert reader.unusable_count == 1


@contextmanager
def no_descriptor():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_agent_without_descriptors_blames_no_attempt_and_reads_on_later(folder):
    attempt = LocalAttempt(ID, folder, 20.0)
    folder.events.write_bytes(line(1))
    folder.outcome.write_text(json.dumps(Outcome(*ID, "succeeded", {0: 0}).to_plain()))
    with no_descriptor():
        assert attempt.outcome is None
        assert attempt.status_if_changed(0, "starting", 9, 9999) is None
    assert (attempt.unreadable, attempt.unusable_data) == ("", None)
    told = attempt.status_if_changed(0, "starting", 9, 9999)
    assert (told.phase, len(told.events), told.outcome.state) == ("ended", 1, "succeeded")

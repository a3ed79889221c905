import re
import resource

import pytest

from workers.attempt.supervision import rank_log
from workers.attempt.supervision.rank_log import MAX_LINE_BYTES, RankLog
from workers.protocol.redaction import Redactor

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z (out|err) (.*)")


@pytest.fixture
def written(tmp_path):
    """written([pieces], secrets) -> what the log then says of stdout, line by line."""

    def write(pieces, *secrets):
        log = RankLog(tmp_path / "rank-0.log", Redactor(secrets))
        for piece in pieces:
            log.feed("out", piece)
        log.close()
        lines = (tmp_path / "rank-0.log").read_text().split("\n")[:-1]
        return [LINE.fullmatch(line)[2] for line in lines]

    return write


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"one\ntwo\n"], ["one", "two"]),
        ([b"o", b"n", b"e\ntw", b"o"], ["one", "two"]),
        ([b"10%\r50%\r100%\n"], ["10%", "50%", "100%"]),
        ([b"dos\r", b"\nnext\r\n"], ["dos", "next"]),
        ([b"\n\n"], ["", ""]),
        ([b"end\r"], ["end"]),
        ([b"caf\xc3", b"\xa9\n"], ["café"]),
        ([b"bad \xff byte\n"], [r"bad \xff byte"]),
        ([], []),
    ],
)
def test_output_becomes_lines_however_it_arrives(written, pieces, lines):
    assert written(pieces) == lines


def test_a_secret_split_over_two_pieces_is_redacted(written):
    assert written([b"token=s3c", b"r3t!\n"], "s3cr3t") == ["token=***!"]


def test_a_secret_in_a_line_without_end_is_redacted(written):
    filler = b"x" * (MAX_LINE_BYTES - 2)
    assert "".join(written([filler, b"s3c", b"r3t", b"y" * 10], "s3cr3t")) == filler.decode() + "***" + "y" * 10


def test_a_full_disk_costs_lines_and_says_how_many(tmp_path):
    """A limit on the file's size takes part of a write and refuses the rest, as a full disk does; then it is lifted."""
    log = RankLog(tmp_path / "log", Redactor([]))
    log.feed("out", b"zero\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "log").stat().st_size + 50, before[1]))
    try:
        log.feed("err", b"one\ntwo\nthree\n")
        log.feed("err", b"four\nfive\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log.feed("out", b"six\n")
    log.close()
    told = [LINE.fullmatch(line)[2] for line in (tmp_path / "log").read_text().split("\n")[:-1]]
    assert told == ["zero", "one", "[polyfleet: 4 lines lost, the disk was full]", "six"]


def test_the_error_on_stderr_is_remembered(tmp_path):
    log = RankLog(tmp_path / "log", Redactor([]))
    log.feed("err", b"Traceback\nValueError: boom\n\n")
    log.feed("out", b"unrelated\n")
    assert log.errors.reason == "ValueError: boom"
    log.close()


@pytest.fixture
def silent(tmp_path, monkeypatch):
    """silent([pieces], secrets) -> lines of the log with their streams, where stdout was silent after each piece."""

    def write(pieces, *secrets):
        monkeypatch.setattr(rank_log, "SILENT_S", 0.0)
        log, seen = RankLog(tmp_path / "rank-0.log", Redactor(secrets)), []
        for piece in pieces:
            log.feed("out", piece)
            log.flush()
            seen.append(lines())
        log.close()
        return [*seen, lines()]

    def lines():
        return [line.partition(" ")[2] for line in (tmp_path / "rank-0.log").read_text().split("\n")[:-1]]

    return write


@pytest.mark.parametrize(
    ("pieces", "first", "last"),
    [
        ([b"shard 7 ... "], ["out+ shard 7 ... "], ["out+ shard 7 ... ", "+out "]),
        ([b"shard 7 ... ", b"done\n"], ["out+ shard 7 ... "], ["out+ shard 7 ... ", "+out done"]),
        ([b"a", b"b", b"c\nd\n"], ["out+ a"], ["out+ a", "+out+ b", "+out c", "out d"]),
        ([b"10%\r50%\r", b"60%\r"], ["out 10%", "out+ 50%"], ["out 10%", "out+ 50%", "+out ", "out+ 60%", "+out "]),
        ([b"dos\r", b"\nnext\r\n"], ["out+ dos"], ["out+ dos", "+out ", "out next"]),
        ([b"caf\xc3", b"\xa9\n"], ["out+ caf"], ["out+ caf", "+out \u00e9"]),
        ([b"\xe2\x98", b"\x83"], [], ["out+ \u2603", "+out "]),
        ([b"whole\n"], ["out whole"], ["out whole"]),
    ],
    ids=["never ended", "ended", "in three", "a progress bar", "CR LF", "half a character", "a third of one", "whole"],
)
def test_the_unfinished_line_of_a_silent_stream_is_written_and_then_completed(silent, pieces, first, last):
    seen = silent(pieces)
    assert (seen[0], seen[-1]) == (first, last)


def test_the_start_of_a_secret_is_not_written_before_the_rest_of_it_has_come(silent):
    seen = silent([b"token=s3c", b"r3t; again s3cr3t and s", b"o on\n"], "s3cr3t")
    assert seen[0] == ["out+ token="]
    assert seen[-1] == ["out+ token=", "+out+ ***; again *** and ", "+out so on"]
    lines = "-----BEGIN\nabcdef\n-----END"
    assert "abcdef" not in str(silent([b"key: -----BEGIN\nabc", b"def\n-----END", b"!\n"], lines))


def test_a_stream_that_goes_on_printing_is_written_by_lines(tmp_path):
    log = RankLog(tmp_path / "log", Redactor([]))
    log.feed("out", b"not yet")
    log.flush()
    assert (tmp_path / "log").read_text() == ""
    log.close()


def test_the_last_line_of_stderr_is_whole_though_it_was_written_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_log, "SILENT_S", 0.0)
    log = RankLog(tmp_path / "log", Redactor([]))
    for piece in (b"OSError: No space ", b"left on ", b"device"):
        log.feed("err", piece)
        log.flush()
    assert log.errors.reason == "OSError: No space left on device" and log.errors.mentions_full_disk
    log.close()
    assert log.errors.reason == "OSError: No space left on device"

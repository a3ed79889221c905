"""A line that was shown before its end is completed, and never shown twice."""

import pytest

from orchestrator.cli.jobs.logs import Printer
from orchestrator.cli.terminal.output import Format
from orchestrator.log_lines import join_lines, parse_line

TIME = "2026-11-20T23:14:53.123456Z"


def lines(*texts, rank=0):
    return [parse_line(f"{TIME} {text}", 1, rank) for text in texts]


def test_marks_are_parts_of_a_line_only_where_they_are():
    whole, first, middle, last = lines("out a + b", "err+ a ", "+err+ b ", "+err c")
    plain = {"time": TIME, "attempt": 1, "rank": 0, "stream": "stderr"}
    assert whole == plain | {"stream": "stdout", "text": "a + b"}
    assert first == plain | {"text": "a ", "unfinished": True}
    assert middle == plain | {"text": "b ", "unfinished": True, "continues": True}
    assert last == plain | {"text": "c", "continues": True}


@pytest.mark.parametrize(
    ("pieces", "whole"),
    [
        (["out+ a ", "+out+ b ", "+out c", "out d"], ["out a b c", "out d"]),
        (["out+ a ", "err oops", "+out b"], ["out a b", "err oops"]),
        (["out+ a ", "err+ x", "+err ", "+out+ b"], ["out+ a b", "err x"]),
        (["+out rest", "out b"], ["+out rest", "out b"]),
        (["out+ a", "out b"], ["out+ a", "out b"]),
        ([], []),
    ],
    ids=["three", "between", "still open", "begun before", "rest lost", "none"],
)
def test_pieces_of_one_line_are_joined_by_rank_and_stream(pieces, whole):
    given = lines(*pieces)
    before = [dict(line) for line in given]
    assert join_lines(given) == lines(*whole)
    assert given == before


def test_pieces_of_other_ranks_are_not_joined():
    given = [*lines("out+ a "), *lines("out+ x ", rank=1), *lines("+out b"), *lines("+out y", rank=1)]
    assert join_lines(given) == [*lines("out a b"), *lines("out x y", rank=1)]


@pytest.mark.parametrize(
    ("pages", "shown"),
    [
        ([["out+ loading "], ["+out+ 50% "], ["+out done", "out next"]], "loading 50% done\nnext\n"),
        ([["out+ loading "]], "loading \n"),
        ([["out+ loading "], ["+out "]], "loading \n"),
        ([["out+ loading "], ["err oops"], ["+out done"]], "loading \noops\ndone\n"),
        ([["out+ loading "], ["err oops"], ["+out "], ["out b"]], "loading \noops\nb\n"),
        ([["out+ a"], ["out b"]], "a\nb\n"),
        ([["+out end of a line"]], "end of a line\n"),
    ],
    ids=["completed", "never", "ended", "between", "between, then its end", "rest lost", "begun before"],
)
def test_what_follows_is_printed_behind_an_unfinished_line(capsys, pages, shown):
    printer = Printer(Format.TABLE)
    for page in pages:
        printer.print(lines(*page))
    printer.close()
    assert capsys.readouterr().out == shown


def test_ranks_are_named_once_there_are_two_and_a_line_goes_on_only_behind_its_own(capsys):
    printer = Printer(Format.TABLE)
    for page in (lines("out+ a "), lines("out+ x ", rank=1), lines("+out b"), lines("+out y", rank=1)):
        printer.print(page)
    printer.close()
    assert capsys.readouterr().out == "a \n[1] x \n[0] b\n[1] y\n"


def test_json_has_each_piece_with_its_marks(capsys):
    printer = Printer(Format.JSON)
    printer.print(lines("out+ a", "+out b"))
    printer.close()
    first, second = capsys.readouterr().out.splitlines()
    assert '"unfinished"' in first and '"continues"' not in first and '"continues"' in second

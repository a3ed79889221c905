"""No text that reaches a terminal through us acts on it; everything harmless stays as it was."""

import json

import pytest

from orchestrator.terminal_text import escape_control, escape_document, log_lines, one_line


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[2J\x1b[1;1Hcleared", "cleared"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bP1$r\x1b\\device", "device"),
        ("\x9b31mred", "red"),
        ("\x9d0;title\x9ctext", "text"),
        ("\x1bcreset", "reset"),
        ("\x1b(0line", "line"),
        ("\x1b]0;never ends", "0;never ends"),
        ("\x1b", "\\x1b"),
        ("a\x00b\x08c\x7f", "a\\x00b\\x08c\\x7f"),
        ("a\u202etxt.exe", "a\\u202etxt.exe"),
        ("\ud800", "\\ud800"),
        ("\x1b\x1b[31m[0m", "\\x1b[0m"),
    ],
)
def test_what_would_act_is_taken_out_or_written_out(hostile, shown):
    assert escape_control(hostile) == shown


@pytest.mark.parametrize(
    "text", ["", "plain", "größer 你好 🙂", "tab\there", "two\nlines", "[bold]not markup[/bold]", "C:\\x1b"]
)
def test_what_is_harmless_stays(text):
    assert escape_control(text) == text


def test_a_cell_is_one_line():
    assert one_line("a\nb\tc\r\nd") == "a b c\\x0d d"


def test_a_progress_bar_becomes_lines():
    assert log_lines("10%\r20%\r\r30%\r\n") == ["10%", "20%", "30%"]


def test_an_escaped_document_means_the_same():
    data = {"k\u202e": "\x1b\x9b\u2028\ud800 ü", "n": [1, "\n"]}
    document = escape_document(json.dumps(data, ensure_ascii=False, indent=1))
    assert json.loads(document) == data
    assert not {"\x9b", "\u202e", "\u2028", "\ud800"} & set(document)
    assert "ü" in document

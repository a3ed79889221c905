"""Variables from a file: what each line gives, and which line is wrong."""

import os
from pathlib import Path

import pytest

from cluster.errors import NotFound, UserError
from orchestrator.submission import env_file

FILE = r"""
# comment
PLAIN=1
export EXPORTED = a b  # behind it
  INDENTED=x
HASH=a#b
FIRST=#1
EMPTY=
NONE= # nothing
SINGLE='a # "b" \n $HOME'  # behind it
DOUBLE="two
lines \"quoted\" \\ \$HOME \x"
JSON={"a": [1, 2]}
URL=postgresql://u@h/d?x=y
PLAIN=2
LAST=end"""


def test_a_line_gives_what_shells_and_dotenv_tools_agree_on():
    assert env_file.parse(FILE, "f") == {
        "PLAIN": "2",
        "EXPORTED": "a b",
        "INDENTED": "x",
        "HASH": "a#b",
        "FIRST": "#1",
        "EMPTY": "",
        "NONE": "",
        "SINGLE": 'a # "b" \\n $HOME',
        "DOUBLE": 'two\nlines "quoted" \\ $HOME \\x',
        "JSON": '{"a": [1, 2]}',
        "URL": "postgresql://u@h/d?x=y",
        "LAST": "end",
    }


def test_lines_of_windows_and_a_mark_of_its_editors_do_not_matter(tmp_path):
    file = tmp_path / "x.env"
    file.write_bytes(b"\xef\xbb\xbfA=1\r\nB='x\r\ny'\r\n")
    assert env_file.read(file) == {"A": "1", "B": "x\ny"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A=1\n\nHUNTER2", "f, line 3: not of the form KEY=VALUE"),
        ("export HUNTER2 x", "f, line 1: not of the form KEY=VALUE"),
        ("A=1\nB='x\ny", "f, line 2: the value has no closing '"),
        ('A="x"y', 'f, line 1: there is text after the closing "'),
        ("1A=HUNTER2", "f, line 1: '1A' cannot be an environment variable"),
        ("=HUNTER2", "f, line 1: '' cannot be an environment variable"),
        ("A='\n\n'\nRAY_X=HUNTER2", "f, line 4: RAY_X is set by Polyfleet itself"),
        ("A=x\0HUNTER2", "f, line 1: A must be text"),
    ],
)
def test_a_wrong_line_is_named_by_its_number_and_its_value_never_told(text, message):
    with pytest.raises(UserError) as caught:
        env_file.parse(text, "f")
    assert caught.value.message.startswith(message)
    assert "HUNTER2" not in str(caught.value)


def test_a_file_that_is_absent_no_text_or_no_file_is_named(tmp_path):
    (tmp_path / "latin").write_bytes(b"A=\xe9")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotFound, match="absent: no such file"):
        env_file.read(tmp_path / "absent")
    with pytest.raises(UserError, match="latin is not UTF-8"):
        env_file.read(tmp_path / "latin")
    for path in (tmp_path / "pipe", tmp_path, Path("~nobody-of-that-name/x")):
        with pytest.raises(UserError, match="cannot be read"):
            env_file.read(path)


def test_the_file_that_is_named_may_be_a_link(tmp_path):
    (tmp_path / "shared.env").write_text("A=1")
    (tmp_path / ".env").symlink_to("shared.env")
    assert env_file.read(tmp_path / ".env") == {"A": "1"}
    (tmp_path / "gone.env").symlink_to("nowhere")
    with pytest.raises(NotFound, match=r"gone\.env: no such file"):
        env_file.read(tmp_path / "gone.env")

"""Reading what somebody we do not trust may have written: never blocking, never following, never without a limit."""

import json
import os
import resource
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import LIMIT_S

from cluster.input.untrusted_files import (
    MAX_INTEGER,
    UnreadableFile,
    depth,
    open_untrusted_in,
    parse_json,
    read_bytes,
    read_json,
)

LIMIT = 1000


def test_a_file_within_its_limit_is_read_whole(tmp_path: Path):
    file = tmp_path / "file"
    file.write_bytes(b"x" * LIMIT)

    assert read_bytes(file, LIMIT) == b"x" * LIMIT


def test_a_pipe_is_refused_at_once_also_one_that_somebody_writes_to(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UnreadableFile, match="not a regular file"):
        read_bytes(pipe, LIMIT)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"x",))
    writer.start()

    with pytest.raises(UnreadableFile, match="not a regular file"):
        read_bytes(pipe, LIMIT)

    os.close(os.dup(reader))
    writer.join(LIMIT_S)
    os.close(reader)


@pytest.mark.parametrize("there", [lambda p: p.mkdir(), lambda p: p.symlink_to("/etc/passwd")])
def test_folders_and_links_are_no_files(tmp_path: Path, there):
    path = tmp_path / "it"
    there(path)

    with pytest.raises(UnreadableFile):
        read_bytes(path, LIMIT)


def test_a_sparse_file_of_a_terabyte_is_refused_by_its_limit(tmp_path: Path):
    file = tmp_path / "sparse"
    with file.open("wb") as f:
        f.truncate(1 << 40)

    with pytest.raises(UnreadableFile, match="longer than the limit of 1000 bytes"):
        read_bytes(file, LIMIT)


def test_an_absent_file_is_told_from_a_bad_one(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "absent", LIMIT)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"a":' * 33 + b"1" + b"}" * 33,
        b"[NaN]",
        b"Infinity",
        b"1e400",
        b"1" * 401,
        b"\xff",
        b"",
        b"{",
        b'["\\ud800"]',
        "[1]".encode("utf-16"),
    ],
)
def test_json_that_would_harm_its_reader_is_refused(text: bytes):
    with pytest.raises(UnreadableFile, match=r"^it "):
        parse_json(text, "it")


def test_numbers_up_to_64_bits_are_read_exactly():
    assert parse_json(b"[%d, -1.5]" % MAX_INTEGER, "it") == [MAX_INTEGER, -1.5]
    with pytest.raises(UnreadableFile, match="beyond 64 bits"):
        parse_json(b"%d" % (MAX_INTEGER + 1), "it")


def test_brackets_in_strings_do_not_count():
    assert depth(json.dumps({"[[[": '"[{\\'}).encode()) == 1


@pytest.mark.parametrize("end", [b"", b"\\"])
def test_the_depth_of_a_string_that_never_ends_is_found_in_linear_time(end: bytes):
    """A megabyte, for which trying each quote as the beginning of a string would take an hour."""
    assert depth(b"[" + b'"' + b'\\"' * 500_000 + end) == 1


def test_a_text_of_whole_characters_is_read_and_half_ones_are_refused():
    assert parse_json(b'"\\ud83d\\ude00 \\\\ud800"', "it") == "\U0001f600 \\ud800"
    with pytest.raises(UnreadableFile, match="surrogates not allowed"):
        parse_json(b'{"\\uDC00": 1}', "it")


def test_a_file_is_opened_in_a_folder_that_is_no_link(tmp_path: Path):
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    (folder / "file").write_bytes(b"x")
    link.symlink_to(folder)

    with open_untrusted_in(folder, "file") as descriptor:
        assert os.read(descriptor, 9) == b"x"
    for place, name, why in [(link, "file", "is not a folder"), (folder / "file", "x", "is not a folder")]:
        with pytest.raises(UnreadableFile, match=why), open_untrusted_in(place, name):
            pass
    with pytest.raises(FileNotFoundError), open_untrusted_in(tmp_path / "absent", "file"):
        pass


def test_a_reader_without_descriptors_blames_nobody(tmp_path: Path):
    (tmp_path / "file").touch()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(UnreadableFile) as told:
            read_bytes(tmp_path / "file", LIMIT)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert told.value.is_transient


finite = st.floats(allow_nan=False, allow_infinity=False)
integers = st.integers(-MAX_INTEGER, MAX_INTEGER)
values = st.recursive(
    st.none() | st.booleans() | finite | integers | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)


@given(values)
def test_whatever_json_holds_comes_back_as_it_was(value):
    assert parse_json(json.dumps(value).encode(), "it") == value


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(data: bytes):
    try:
        parse_json(data, "it")
    except UnreadableFile:
        return

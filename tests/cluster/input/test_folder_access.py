"""Folders that anybody fills are listed, read and written without a link in them being followed."""

import os
from pathlib import Path

import pytest

from cluster.errors import Conflict, NotFound, UserError
from cluster.input.folder_access import PIECE_BYTES, FolderTree, digest, normalize_path
from cluster.input.folder_entries import link_error


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "root").mkdir()
    return FolderTree(tmp_path / "root")


def paths(entries):
    return [entry["path"] for entry in entries]


def test_what_is_in_a_folder_is_listed_page_by_page_in_the_order_of_its_parts(tree):
    for path in ("a/x", "a/y", "a.txt", "b", "a/deep/z"):
        tree.write(path, 0, b"1")
    whole = ["a", "a/deep", "a/deep/z", "a/x", "a/y", "a.txt", "b"]
    assert paths(tree.all_entries()) == whole and paths(tree.entries("a")[0]) == whole[1:5]
    assert paths(tree.entries("a/x")[0]) == ["a/x"]
    for most in range(1, 8):
        found, after = [], ""
        while True:
            page, after = tree.entries(after=after, limit=most)
            found += paths(page)
            if not after:
                break
        assert found == whole


def test_names_that_are_no_text_or_that_a_terminal_would_act_on_are_listed_and_may_not_travel(tree):
    for name in (b"\xff\xfe", b"a\nb", b"back\\slash", b"\x1b[31m"):
        os.close(os.open(os.fsencode(tree.root) + b"/" + name, os.O_CREAT | os.O_WRONLY))
    found = list(tree.all_entries())
    assert len(found) == 4 and all(entry["refused"] for entry in found)
    assert sum(len(tree.entries(after=tree.entries(limit=n)[1])[0]) for n in (1, 2, 3)) == 6


def test_no_link_is_followed_on_the_way_or_at_the_end(tree, tmp_path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/file").write_text("canary")
    (tree.root / "folder").symlink_to(tmp_path / "secret")
    (tree.root / "file").symlink_to(tmp_path / "secret/file")
    for call in (
        lambda: tree.read("file", 0),
        lambda: tree.read("folder/file", 0),
        lambda: tree.write("file", 0, b"x"),
        lambda: tree.write("folder/new", 0, b"x"),
        lambda: tree.create_folder("folder/new"),
        lambda: tree.entries("folder/file"),
        lambda: tree.link("folder/new", "a"),
    ):
        with pytest.raises(UserError):
            call()
    assert paths(tree.all_entries()) == ["file", "folder"]
    assert os.listdir(tmp_path / "secret") == ["file"]  # noqa: PTH208
    assert (tmp_path / "secret/file").read_text() == "canary"


def test_a_base_that_was_replaced_by_a_link_is_not_entered(tree, tmp_path):
    (tree.root / "job").mkdir()
    (tree.root / "job/output-1").symlink_to(tmp_path)
    with pytest.raises(UserError, match="name a path without links"):
        FolderTree(tree.root, "job/output-1").entries()


def test_a_pipe_is_no_file_and_nobody_waits_for_it(tree):
    os.mkfifo(tree.root / "pipe")
    for call in (lambda: tree.read("pipe", 0), lambda: tree.write("pipe", 0, b"x")):
        with pytest.raises(UserError):
            call()
    assert [entry["type"] for entry in tree.all_entries()] == ["other"]


@pytest.mark.parametrize("path", ["..", "a/../../b", "/etc", "a\0b", "a\\b", "x" * 300, "/".join("d" * 70)])
def test_a_path_that_could_leave_the_folder_is_refused(tree, path):
    for call in (
        tree.entry,
        lambda p: tree.read(p, 0),
        lambda p: tree.write(p, 0, b""),
        tree.create_folder,
        normalize_path,
    ):
        with pytest.raises(UserError):
            call(path)


@pytest.mark.parametrize(
    ("path", "target", "stays"),
    [
        ("latest", "step-10", True),
        ("a/latest", "../step-10", True),
        ("a/b/l", "../../x/y", True),
        ("latest", "../x", False),
        ("a/l", "../../x", False),
        ("l", "/etc/passwd", False),
        ("d/l", "s/../../x", False),
        ("l", "a/..", False),
        ("l", "", False),
    ],
)
def test_only_a_link_that_stays_inside_is_made(tree, path, target, stays):
    assert (link_error(path, target) == "") is stays
    if stays:
        tree.link(path, target)
        assert (tree.root / path).readlink() == Path(target)
    else:
        with pytest.raises(UserError):
            tree.link(path, target)


def test_a_file_is_written_in_pieces_and_has_their_hashes(tree):
    data = os.urandom(PIECE_BYTES + 100)
    tree.write("f", PIECE_BYTES, data[PIECE_BYTES:])
    tree.write("f", 0, data[:PIECE_BYTES] + b"too long" * 50)
    tree.finish("f", len(data), 1000.5, 0o755)
    tree.write("f", 0, data[:PIECE_BYTES])
    tree.write("f", PIECE_BYTES, data[PIECE_BYTES:])
    tree.finish("f", len(data), 1000.5, 0o755)
    assert tree.hashes("f")[1] == [digest(data[:PIECE_BYTES]), digest(data[PIECE_BYTES:])]
    piece = tree.read("f", PIECE_BYTES)
    assert (piece.data, piece.size_bytes, piece.modified_s, piece.mode) == (
        data[PIECE_BYTES:],
        len(data),
        1000.5,
        0o755,
    )
    tree.write("f", 3, b"x")
    assert tree.read("f", 0).version != piece.version


def test_a_file_takes_its_place_at_once_and_no_other_s_unless_that_is_wanted(tree, tmp_path):
    other = FolderTree(tmp_path)
    tree.write("new", 0, b"new")
    other.write("there/old", 0, b"old")
    with pytest.raises(Conflict):
        tree.move("new", other, "there/old", overwrite=False)
    assert other.read("there/old", 0).data == b"old" and tree.exists("new")
    tree.move("new", other, "there/old", overwrite=True)
    assert other.read("there/old", 0).data == b"new" and not tree.exists("new")
    tree.write("again", 0, b"1")
    with pytest.raises(Conflict, match="is not a regular file"):
        tree.move("again", other, "there", overwrite=True)
    with pytest.raises(NotFound):
        tree.move("absent", other, "x", overwrite=True)

"""Archives and folders made to break a reader are refused where they are submitted, with a sentence; no node fails."""

import hashlib
import io
import os
import stat
import subprocess
import warnings
import zipfile
from pathlib import Path

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from cluster.errors import PolyfleetError, SpecError, UserError
from cluster.input import archive_checks, archive_entries, archive_unpack
from orchestrator.code_archives import code_archive, ignore_file
from orchestrator.runtime.files.code_archives import ServerCodeArchives as Uploaded
from workers.storage.code_archives import NodeCodeArchives as OnNode


def archive(*entries, method=zipfile.ZIP_DEFLATED):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as z:
        for name, content in entries:
            z.writestr(name, content)
    return made.getvalue()


def changed(data, at, new):
    return data[:at] + new + data[at + len(new) :]


HONEST = archive(("train.py", "x = 1\n" * 50), ("pkg/model.py", "y = 2\n" * 50))
DIRECTORY, END = HONEST.index(b"PK\x01\x02"), HONEST.rindex(b"PK\x05\x06")
CORRUPT = {
    "a version no reader knows": changed(HONEST, DIRECTORY + 6, b"\xff\xff"),
    "a compression no reader knows": changed(HONEST, DIRECTORY + 10, b"\x63\x00"),
    "a name that is not UTF-8": changed(
        changed(HONEST, DIRECTORY + 8, b"\x00\x08"), HONEST.index(b"train.py", DIRECTORY), b"\xff\xfe"
    ),
    "a directory that begins too late": changed(HONEST, END + 16, (DIRECTORY + 7).to_bytes(4, "little")),
    "a directory that begins too early": changed(HONEST, END + 16, (DIRECTORY - 7).to_bytes(4, "little")),
    "something before it": b"#!/bin/sh\n" + HONEST,
    "something after it": HONEST + b"more",
    "a file that begins elsewhere": changed(HONEST, DIRECTORY + 42, b"\x05\0\0\0"),
    "a file that begins behind the directory": changed(HONEST, DIRECTORY + 42, b"\xff\xff\xff\x7f"),
    "content that does not unpack": changed(HONEST, HONEST.index(b"train.py") + 12, b"\xff" * 6),
    "a wrong checksum": changed(HONEST, DIRECTORY + 16, b"\0\0\0\0"),
    "a size that is too small": changed(HONEST, DIRECTORY + 24, (10).to_bytes(4, "little")),
    "a size that is too large": changed(HONEST, DIRECTORY + 24, (9999).to_bytes(4, "little")),
    "other names beside the files": changed(HONEST, HONEST.index(b"train.py"), b"other.py"),
    "a file of several parts": changed(HONEST, END + 4, b"\1\0"),
    "patched data": changed(changed(HONEST, DIRECTORY + 8, b"\x20\0"), 6, b"\x20\0"),
    "an extra field that is cut off": changed(HONEST, DIRECTORY + 30, b"\xff\x00"),
}


@pytest.fixture
def uploaded(tmp_path):
    return Uploaded(tmp_path / "uploaded")


def given(folder, data):
    path = folder / "given.zip"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("what", CORRUPT)
def test_an_archive_that_no_node_can_unpack_is_refused_at_its_upload(uploaded, tmp_path, what):
    """Accepted here it would fail on the node, look like the node's failure, and be tried again for ever."""
    data = CORRUPT[what]
    with pytest.raises(UserError, match="the submitted archive"):
        uploaded.store(hashlib.sha256(data).hexdigest(), given(tmp_path, data))
    assert not list((tmp_path / "uploaded").iterdir())


@pytest.mark.parametrize("what", CORRUPT)
def test_a_node_that_is_sent_it_all_the_same_tells_the_users_mistake(tmp_path, what):
    data = CORRUPT[what]
    store, sha, target = OnNode(tmp_path / "node"), hashlib.sha256(data).hexdigest(), tmp_path / "work"
    target.mkdir()
    with pytest.raises(UserError, match="the submitted archive"):
        store.put(sha, 0, data, True)
        store.unpack(sha, target)


@pytest.mark.parametrize("what", CORRUPT)
def test_an_archive_whose_names_were_lost_is_refused_at_submit(uploaded, tmp_path, what):
    """Names are read at submit: whatever is wrong with the directory is the user's error there, too."""
    data = CORRUPT[what]
    (tmp_path / "uploaded" / f"{hashlib.sha256(data).hexdigest()}.zip").write_bytes(data)
    try:
        assert uploaded.contents(hashlib.sha256(data).hexdigest())
    except PolyfleetError as e:
        assert isinstance(e, UserError)


def test_a_sound_archive_is_read_once_and_kept(uploaded, tmp_path):
    sha = hashlib.sha256(HONEST).hexdigest()
    uploaded.store(sha, given(tmp_path, HONEST))
    assert uploaded.is_stored(sha) and uploaded.contents(sha).names == ["train.py", "pkg/model.py"]


def test_a_comment_behind_an_archive_is_no_harm(tmp_path):
    """As `git archive` writes the commit there."""
    path = given(tmp_path, HONEST)
    with zipfile.ZipFile(path, "a") as z:
        z.comment = b"4db433f"
    assert archive_unpack.read(path).names == ["train.py", "pkg/model.py"]


def test_a_directory_of_millions_of_files_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(archive_checks, "MAX_DIRECTORY_BYTES", 64)
    monkeypatch.setattr(zipfile, "ZipFile", None)  # reading it would fail otherwise
    with pytest.raises(UserError, match="its directory of 2 files takes more than"):
        archive_checks.check(given(tmp_path, HONEST))


def test_files_deep_in_folders_are_refused_before_each_folder_of_each_is_looked_at(tmp_path):
    deep = archive(*((f"{'a/' * 400}{number}", "") for number in range(2000)), method=zipfile.ZIP_STORED)
    with pytest.raises(UserError, match="more than 64 folders deep"):
        archive_checks.check(given(tmp_path, deep))


def test_folders_of_files_count_too(tmp_path, monkeypatch):
    monkeypatch.setattr(archive_checks, "MAX_ENTRIES", 20)
    wide = archive(*((f"{number}/a/b/c/d/e/f", "") for number in range(19)))
    with pytest.raises(UserError, match="more than 20 folders"):
        archive_checks.check(given(tmp_path, wide))


def entry(name, mode, modified_s=0):
    info = zipfile.ZipInfo(name)
    info.create_system, info.external_attr, info.extra = 3, mode << 16, archive_entries.time_field(modified_s)
    return info


@pytest.mark.parametrize("modified_s", [-(1 << 31), -1, (1 << 31) - 1])
@pytest.mark.parametrize("mode", [0o7777, 0o1777, 0o2000, 0o001, 0])
def test_a_folder_gets_no_special_bits_and_stays_its_owners_whatever_is_said_of_it(tmp_path, mode, modified_s):
    """Also a folder without a type, which is one by its slash."""
    (tmp_path / "there").mkdir()
    folders = [entry("a/", stat.S_IFDIR | mode, modified_s), entry("a/b/", mode, modified_s)]
    data = archive(*((info, "") for info in folders), ("a/b/file", "x"))
    archive_unpack.read_in_child(given(tmp_path, data), tmp_path / "there")
    for name in ("a", "a/b"):
        there = (tmp_path / "there" / name).stat()
        assert there.st_mode & 0o700 == 0o700 and not there.st_mode & 0o7022
    assert there.st_mtime == modified_s


FOLDERS = {
    "that leaves": [entry("../a/", stat.S_IFDIR | 0o755)],
    "that is absolute": [entry("/a/", stat.S_IFDIR | 0o755)],
    "without a name": [entry("a//", stat.S_IFDIR | 0o755)],
    "that is a link": [entry("a/", stat.S_IFLNK | 0o777)],
    "named like a link": [entry("a", stat.S_IFLNK | 0o777), entry("a/", stat.S_IFDIR | 0o777)],
    "below a link": [entry("a", stat.S_IFLNK | 0o777), entry("a/b/", stat.S_IFDIR | 0o777)],
    "below a link in another case": [entry("a", stat.S_IFLNK | 0o777), entry("A/b/", stat.S_IFDIR | 0o777)],
}


@pytest.mark.parametrize("what", FOLDERS)
def test_a_folder_elsewhere_gets_no_permissions(tmp_path, what):
    for name in ("there", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "elsewhere").chmod(0o700)
    data = archive(
        *((info, b"../elsewhere" if stat.S_ISLNK(info.external_attr >> 16) else b"") for info in FOLDERS[what])
    )
    with pytest.raises(UserError, match="the submitted archive"):
        archive_unpack.read_in_child(given(tmp_path, data), tmp_path / "there")
    assert (tmp_path / "elsewhere").stat().st_mode & 0o777 == 0o700 and not list((tmp_path / "there").iterdir())


@pytest.mark.parametrize("of", [Uploaded, OnNode])
def test_what_a_killed_process_had_received_is_removed_at_the_next_start(tmp_path, of):
    (tmp_path / ".incoming-x").write_bytes(b"half")
    (tmp_path / f"{'0' * 64}.zip").write_bytes(b"whole")
    of(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{'0' * 64}.zip"]


# -- folders on their way


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "project"
    made.mkdir()
    (made / "train.py").write_text("def train(ctx): ...")
    return made


def pack(folder):
    return code_archive.pack(folder, "run", folder.parent / "package.zip")


def names(package):
    with zipfile.ZipFile(package.path) as z:
        return [name for name in z.namelist() if not name.endswith("/")]


def test_very_many_nested_folders_are_refused_with_a_sentence(folder):
    """Each level opened from the one above: one path of 1,200 names would be longer than the system takes."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    try:
        with pytest.raises(SpecError, match="in more than 64 folders"):
            pack(folder)
    finally:
        subprocess.run(["rm", "-rf", folder / "d"], check=True)  # pytest's own removal recurses


@pytest.mark.parametrize("name", ["a\nb", "a\\b", "\x1b[2J", "a\x7f"])
def test_a_name_that_no_node_would_take_is_refused_before_it_is_sent(folder, name):
    (folder / name).write_text("")
    with pytest.raises(SpecError, match="control character or backslash"):
        pack(folder)


def test_two_names_that_some_file_systems_take_for_one_are_refused_before_they_are_sent(folder):
    (folder / "Train.py").write_text("")
    with pytest.raises(UserError, match="in another case"):
        pack(folder)
    assert not (folder.parent / "package.zip").exists()


SECRET = (".env", ".env.production", "conf/.env", "key.pem", ".netrc", "id_rsa", ".aws/credentials", "a/.ssh/config")
HARMLESS = (".env.example", "environment.py", "id_map.json", "docs/env", "aws/main.py")


def with_files(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    return folder


def test_what_looks_like_credentials_stays_behind_and_is_named(folder):
    package = pack(with_files(folder, *SECRET, *HARMLESS))
    assert names(package) == sorted(("train.py", *HARMLESS))
    assert package.left_out.credentials == (
        *(".aws/", ".env", ".env.production", ".netrc", "a/.ssh/", "conf/.env", "id_rsa", "key.pem"),
    )
    (told,) = package.left_out.messages
    assert "left out of the submitted folder, because they may hold credentials: .aws/, .env, " in told
    assert "and 3 more. To send .aws/ anyway, write !/.aws/ into .polyfleetignore" in told


def test_a_line_in_the_users_own_file_sends_them(folder):
    (with_files(folder, *SECRET) / ".polyfleetignore").write_text("!.env\n!.aws/\n!*.pem\n!id_rsa\n")
    package = pack(folder)
    assert {".env", "conf/.env", ".aws/credentials", "key.pem", "id_rsa"} <= set(names(package))
    assert package.left_out.credentials == (".env.production", ".netrc", "a/.ssh/")


def test_nothing_is_told_where_nothing_was_left_out(folder):
    assert pack(folder).left_out.messages == ()


def test_python_users_are_warned(folder):
    from orchestrator.client.client import Client

    package = pack(with_files(folder, ".env"))
    heard = []
    with Client("http://127.0.0.1:9", "token", progress=heard.append) as told, Client("http://127.0.0.1:9", "t") as api:
        told.notify(package.left_out.messages[0])
        with pytest.warns(UserWarning, match=r"credentials: \.env\."):
            api.notify(package.left_out.messages[0])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            api.notify("")
    assert heard == list(package.left_out.messages)


def test_a_users_file_that_is_a_pipe_does_not_block(folder):
    os.mkfifo(folder / ignore_file.FILE)
    with pytest.raises(SpecError, match="is not a regular file"):
        pack(folder)


def test_this_repository_leaves_no_file_of_its_own_behind():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=Path(__file__).parent, capture_output=True, check=True)
    rules = ignore_file.load_rules(Path("/nonexistent"))
    assert [name for name in listed.stdout.decode().split("\0") if name and rules.exclusion_reason(name, False)] == []


@drawn(extra=st.binary(max_size=40), seconds=st.integers(-(1 << 31), (1 << 31) - 1))
def test_extra_fields_hold_anything_and_times_are_read_from_sound_ones_alone(extra, seconds):
    info = zipfile.ZipInfo("a")
    info.extra = extra
    read = archive_entries.modification_time_s(info)
    assert read is None or -(1 << 31) <= read < 1 << 31
    info.extra = b"\x75\x70\x02\x00ab" + archive_entries.time_field(seconds) + extra
    assert archive_entries.modification_time_s(info) == seconds

"""A folder becomes one archive, always the same; what must not travel is left out or refused with a sentence."""

import contextlib
import os
import shutil
import socket
import stat
import subprocess
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.errors import SpecError, UserError
from cluster.input import archive_entries, archive_unpack
from orchestrator.code_archives import code_archive


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "project"
    (folder / "lib").mkdir(parents=True)
    (folder / "train.py").write_text("def train(ctx): ...")
    (folder / "lib" / "model.py").write_text("x = 1")
    return folder


def pack(folder, task="train"):
    return code_archive.pack(folder, task, folder.parent / "package.zip")


def names(package):
    with zipfile.ZipFile(package.path) as zipped:
        return archive_entries.without_parents(zipped.namelist())


def test_the_same_folder_gives_the_same_bytes_wherever_and_the_same_content_whenever(folder, tmp_path):
    first = pack(folder)
    other = tmp_path / "elsewhere" / "copy"
    shutil.copytree(folder, other)
    assert pack(other) == replace(first, path=other.parent / "package.zip")
    os.utime(other / "train.py", (1, 1))
    touched = pack(other)
    assert touched.sha != first.sha and touched.content_sha == first.content_sha
    (other / "train.py").write_text("def train(ctx): pass")
    assert pack(other).content_sha != first.content_sha
    shutil.copy(folder / "train.py", other)
    (other / "train.py").chmod(0o755)
    assert pack(other).content_sha != first.content_sha


def test_times_of_files_arrive(folder, tmp_path):
    """In whole seconds, as `make` compares them; a time beyond the format's is that of the copy."""
    times = {"train.py": 1_700_000_000, "lib/model.py": -5, "late.py": 1 << 40}
    (folder / "late.py").touch()
    for name, at_s in times.items():
        os.utime(folder / name, (at_s, at_s))
    package = pack(folder)
    told = archive_unpack.read_in_child(package.path, tmp_path / "there")
    arrived = {name: int((tmp_path / "there" / name).stat().st_mtime) for name in times}
    assert arrived["train.py"] == 1_700_000_000 and arrived["lib/model.py"] == -5
    assert abs(arrived["late.py"] - time.time()) < 3600
    assert told.content_sha == package.content_sha


@pytest.mark.skipif(not shutil.which("unzip"), reason="unzip is not installed")
def test_unzip_reads_the_times(folder, tmp_path):
    os.utime(folder / "train.py", (1_700_000_001, 1_700_000_001))
    subprocess.run(["unzip", "-q", pack(folder).path, "-d", tmp_path / "there"], check=True)
    assert (tmp_path / "there/train.py").stat().st_mtime == 1_700_000_001


def test_files_arrive_whole_with_their_executable_bit(folder):
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o700)
    package = pack(folder)
    with zipfile.ZipFile(package.path) as zipped:
        assert zipped.read("lib/model.py") == b"x = 1"
        modes = {info.filename: info.external_attr >> 16 & 0o777 for info in zipped.infolist()}
    assert modes == {"lib/": 0o755, "lib/model.py": 0o644, "run.sh": 0o700, "train.py": 0o644}
    assert (package.files, package.bytes) == (3, len("#!/bin/sh\n") + len("x = 1") + len("def train(ctx): ..."))


def test_history_caches_environments_and_compiled_files_stay_here(folder):
    for skipped in (".git/config", "__pycache__/a.pyc", ".venv/bin/python", "lib/node_modules/x.js", "old.pyc"):
        path = folder / skipped
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    assert names(pack(folder)) == ["lib/model.py", "train.py"]


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(SpecError, match=r"working_dir: .*/absent does not exist"):
        code_archive.pack(tmp_path / "absent", "run", tmp_path / "a.zip")


def test_a_file_is_no_folder(folder):
    with pytest.raises(SpecError, match="is not a folder"):
        pack(folder / "train.py")


def links(package):
    with zipfile.ZipFile(package.path) as zipped:
        found = {info.filename: info for info in zipped.infolist() if stat.S_ISLNK(info.external_attr >> 16)}
        return {name: zipped.read(info).decode() for name, info in found.items()}


def test_links_inside_the_folder_come_as_links(folder):
    (folder / "alias.py").symlink_to("lib/model.py")
    (folder / "also").symlink_to("lib")
    (folder / "lib" / "up").symlink_to("..")
    (folder / "libx.so").symlink_to("libx.so.1")
    (folder / "libx.so.1").symlink_to("libx.so.1.2")
    (folder / "libx.so.1.2").write_bytes(b"ELF")
    package = pack(folder)
    assert links(package) == {
        "alias.py": "lib/model.py",
        "also": "lib",
        "lib/up": "..",
        "libx.so": "libx.so.1",
        "libx.so.1": "libx.so.1.2",
    }
    assert names(package) == sorted((*links(package), "lib/model.py", "libx.so.1.2", "train.py"))
    assert package.files == 3
    before = package.sha
    (folder / "alias.py").unlink()
    (folder / "alias.py").symlink_to("train.py")
    assert pack(folder).sha != before


def test_they_arrive_as_they_were(folder, tmp_path):
    (folder / "lib" / "alias.py").symlink_to("model.py")
    (folder / "also").symlink_to("lib")
    (tmp_path / "there").mkdir()
    told = archive_unpack.read_in_child(pack(folder).path, tmp_path / "there").names
    assert told == ["also/", "lib/alias.py", "lib/model.py", "train.py"]
    assert (tmp_path / "there" / "lib" / "alias.py").readlink() == Path("model.py")
    assert (tmp_path / "there" / "also" / "alias.py").read_text() == "x = 1"


COPIED = {
    "an absolute path": lambda folder: (folder / "l").symlink_to(folder / "lib"),
    "through another link": lambda folder: (folder / "d").symlink_to("lib") or (folder / "l").symlink_to("d/../lib"),
    "out of the folder and back": lambda folder: (folder / "l").symlink_to(f"../{folder.name}/lib"),
    "a link that comes as a copy": lambda folder: (
        (folder / "m").symlink_to(folder / "lib") or (folder / "l").symlink_to("m")
    ),
}


@pytest.mark.parametrize("what", COPIED)
def test_where_a_link_is_not_known_to_be_safe_its_content_comes(folder, what):
    COPIED[what](folder)
    package = pack(folder)
    assert "l" not in links(package) and "l/model.py" in names(package)


def test_a_link_to_what_stays_behind_comes_as_a_copy(folder):
    (folder / "big.bin").write_text("data")
    (folder / "l.bin").symlink_to("big.bin")
    (folder / ".polyfleetignore").write_text("/big.bin\n")
    package = pack(folder)
    assert names(package) == [".polyfleetignore", "l.bin", "lib/model.py", "train.py"]
    assert links(package) == {}


def test_in_a_folder_that_comes_as_a_copy_links_are_links(folder):
    (folder / "lib" / "alias.py").symlink_to("model.py")
    (folder / "also").symlink_to(folder / "lib")
    assert links(pack(folder)) == {"also/alias.py": "model.py", "lib/alias.py": "model.py"}


def test_a_link_to_a_folder_cannot_hide_our_modules(folder):
    (folder / "cluster").symlink_to("lib")
    with pytest.raises(SpecError, match="hide Polyfleet's own package 'cluster'"):
        pack(folder)


@pytest.mark.parametrize("target", ["/etc/passwd", "../secret", "/", "lib/../../secret"])
def test_a_link_that_leads_out_is_refused(folder, target):
    (folder.parent / "secret").write_text("s")
    (folder / "link").symlink_to(target)
    with pytest.raises(SpecError, match="outside the folder"):
        pack(folder)


def test_a_folder_linked_from_outside_is_refused_as_a_whole(folder, tmp_path):
    (tmp_path / "outside").mkdir()
    (folder / "lib" / "data").symlink_to(tmp_path / "outside")
    with pytest.raises(SpecError, match="outside the folder"):
        pack(folder)


def test_a_circle_of_links_is_refused(folder):
    (folder / "lib" / "up").symlink_to(folder)  # a relative one comes as a link
    with pytest.raises(SpecError, match="link to a folder it is in"):
        pack(folder)


def test_the_working_folder_itself_may_be_a_link(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    assert names(code_archive.pack(tmp_path / "link", "run", tmp_path / "a.zip")) == ["lib/model.py", "train.py"]


def bound_socket(path):
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
        made.bind(path.name)


def device(kind):
    """A node of the null device, or of the first ramdisk: nobody opens it."""

    def make(path):
        try:
            os.mknod(path, kind | 0o600, os.makedev(1, 3 if kind == stat.S_IFCHR else 0))
        except PermissionError as e:
            pytest.skip(f"this user may not make a device: {e}")

    return make


NO_FILES = {
    "link to nothing": lambda path: path.symlink_to("me@host.12345:1700000000"),
    "link to nothing outside": lambda path: path.symlink_to("/absent/data"),
    "link through a file": lambda path: path.symlink_to("train.py/x"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "socket": bound_socket,
    "pipe": os.mkfifo,
    "device": device(stat.S_IFCHR),
    "device outside, of blocks": device(stat.S_IFBLK),
    "device outside": lambda path: path.symlink_to("/dev/null"),
}


@pytest.mark.parametrize("what", NO_FILES)
@pytest.mark.parametrize("name", [".#train.py", "lib/odd [1].x"])
def test_what_has_no_content_stays_behind_and_is_named_with_its_pattern(folder, what, name):
    NO_FILES[what](folder / name)
    package = pack(folder)
    assert names(package) == ["lib/model.py", "train.py"]
    (told,) = package.left_out.messages
    assert f"{name} ({what.partition(' outside')[0].replace('through a file', 'to nothing')}" in told
    pattern = told.partition("write ")[2].partition(" into .polyfleetignore")[0]
    (folder / ".polyfleetignore").write_text(f"{pattern}\n")
    package = pack(folder)
    assert (names(package), package.left_out.messages) == ([".polyfleetignore", "lib/model.py", "train.py"], ())
    (folder / ".polyfleetignore").write_text(f"!{pattern}\n")
    with pytest.raises(SpecError, match=r"no content to send.*\.polyfleetignore"):
        pack(folder)


GENERATED = {
    "__pycache__/x.cpython-311.pyc": "__pycache__/",
    "lib/.ipynb_checkpoints/a.ipynb": "lib/.ipynb_checkpoints/",
    ".mypy_cache/3.11/a.json": ".mypy_cache/",
    "my-env/pyvenv.cfg": "my-env/",
    "conda/conda-meta/history": "conda/",
    "old.pyc": "old.pyc",
    ".train.py.swp": ".train.py.swp",
    "core.4711": "core.4711",
}
DUMP = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x04\0" + bytes(100)


@pytest.mark.parametrize("file", GENERATED)
def test_what_tools_make_anew_stays_behind_is_named_and_can_be_kept(folder, file):
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_bytes(DUMP)
    package = pack(folder)
    assert names(package) == ["lib/model.py", "train.py"]
    (told,) = package.left_out.messages
    assert GENERATED[file] in told
    (folder / ".polyfleetignore").write_text(told.partition("write ")[2].partition(" into .polyfleetignore")[0])
    package = pack(folder)
    assert file in names(package)
    assert package.left_out.messages == ()


def test_core_is_a_folder_of_code_or_a_text_too(folder):
    (folder / "core").mkdir()
    (folder / "core" / "a.py").write_text("")
    (folder / "core.txt").write_bytes(DUMP[:16] + b"\x02\0")  # a program
    assert names(pack(folder))[:2] == ["core.txt", "core/a.py"]


def test_history_is_named_and_never_sent(folder):
    (folder / ".git").mkdir()
    (folder / ".polyfleetignore").write_text("!.git\n")
    package = pack(folder)
    assert names(package) == [".polyfleetignore", "lib/model.py", "train.py"]
    (told,) = package.left_out.messages
    assert ".git/" in told and "clones the repository" in told


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_link_to_data_outside_is_refused_with_two_ways_out(folder, tmp_path, kind):
    data = tmp_path / "data"
    data.mkdir() if kind == "folder" else data.write_text("x")
    (folder / "lib" / "data").symlink_to(data)
    with pytest.raises(SpecError) as caught:
        pack(folder)
    remedy = caught.value.remedy
    assert "/lib/data into .polyfleetignore" in remedy
    assert f"uri: {data}, mount: lib/data{'/' * (kind == 'folder')}}}" in remedy
    (folder / ".polyfleetignore").write_text("/lib/data\n")
    assert names(pack(folder)) == [".polyfleetignore", "lib/model.py", "train.py"]


def test_empty_folders_are_sent_also_those_whose_files_stay_behind(folder):
    (folder / "outputs" / "logs").mkdir(parents=True)
    (folder / "runs").mkdir()
    (folder / "runs" / "old.log").write_text("")
    (folder / ".gitignore").write_text("*.log\n/gone/\n")
    (folder / "gone").mkdir()
    (folder / ".git").mkdir()
    package = pack(folder)
    assert names(package) == [".gitignore", "lib/model.py", "outputs/logs/", "runs/", "train.py"]
    assert package.files == 3


@pytest.mark.parametrize(
    ("mode", "sent"),
    [(0o644, 0o644), (0o664, 0o644), (0o755, 0o755), (0o775, 0o755), (0o700, 0o700), (0o600, 0o600), (0o444, 0o444),
     (0o555, 0o555), (0o4755, 0o755)],
)  # fmt: skip
def test_modes_arrive_whatever_the_umask_of_the_other_side_is(folder, tmp_path, mode, sent):
    (folder / "train.py").chmod(mode)
    package = pack(folder)
    (tmp_path / "there").mkdir()
    before = os.umask(0o077)
    try:
        archive_unpack.read_in_child(package.path, tmp_path / "there")
    finally:
        os.umask(before)
    assert (tmp_path / "there" / "train.py").stat().st_mode & 0o7777 == sent


@pytest.mark.parametrize(
    ("mode", "sent"),
    [(0o755, 0o755), (0o775, 0o755), (0o700, 0o700), (0o770, 0o700), (0o555, 0o755), (0o2777, 0o755)],
)
def test_modes_and_times_of_folders_arrive_and_their_owner_can_write(folder, tmp_path, mode, sent):
    """Whatever the umask is on either side; links and files are made in them before."""
    (folder / "lib" / "empty").mkdir()
    (folder / "lib" / "alias").symlink_to("model.py")
    (folder / "linked").symlink_to(folder / "lib")  # comes as a copy
    for at_s, name in enumerate(("lib", "lib/empty"), start=1_700_000_000):
        (folder / name).chmod(mode)
        os.utime(folder / name, (at_s, at_s))
    package = pack(folder)
    (tmp_path / "there").mkdir()
    before = os.umask(0o077)
    try:
        told = archive_unpack.read_in_child(package.path, tmp_path / "there")
    finally:
        os.umask(before)
        for name in ("lib", "lib/empty"):
            (folder / name).chmod(0o755)
    names_there = ("lib", "lib/empty", "linked", "linked/empty")
    arrived = {name: (tmp_path / "there" / name).stat() for name in names_there}
    assert {name: there.st_mode & 0o7777 for name, there in arrived.items()} == dict.fromkeys(names_there, sent)
    assert [there.st_mtime for there in arrived.values()] == [1_700_000_000, 1_700_000_001] * 2
    assert told.content_sha == package.content_sha
    assert "lib/" not in told.names and "lib/empty/" in told.names


def test_what_is_left_out_of_a_folder_does_not_make_it_another(folder):
    """A cache changes the time of its folder: then none is sent."""
    cache = folder / "lib" / "__pycache__"
    cache.mkdir()
    first = pack(folder)
    os.utime(folder / "lib", (1, 1))
    assert pack(folder).sha == first.sha
    cache.rmdir()
    os.utime(folder / "lib", (1, 1))
    assert pack(folder).sha != first.sha and pack(folder).content_sha == first.content_sha


def test_folders_are_counted_apart_from_files(folder, monkeypatch):
    monkeypatch.setattr(code_archive, "LIMIT_FILES", 2)
    assert pack(folder).files == 2
    monkeypatch.setattr(code_archive, "LIMIT_FOLDERS", 1)
    assert pack(folder).files == 2
    (folder / "lib" / "deep").mkdir()
    with pytest.raises(SpecError, match="MiB, 2 files or 1 folders; the largest so far"):
        pack(folder)


def test_a_name_that_is_not_utf8_is_refused(folder):
    (folder / os.fsdecode(b"\xff.py")).write_text("")
    with pytest.raises(SpecError, match="not UTF-8"):
        pack(folder)


@pytest.mark.parametrize(
    "name", ["workers.py", "cluster/__init__.py", "orchestrator/deep/x.py", "workers.cpython-311.so"]
)
@pytest.mark.parametrize("task", ["prepare", "train", "benchmark"])
def test_a_module_that_would_hide_ours_is_refused_with_a_new_name(folder, name, task):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("")
    with pytest.raises(SpecError) as caught:
        pack(folder, task)
    module = name.partition("/")[0].partition(".")[0]
    assert f"hide Polyfleet's own package {module!r}" in caught.value.message
    assert f"my_{module}" in caught.value.remedy
    assert not (folder.parent / "package.zip").exists()


@pytest.mark.parametrize(
    "name", ["workers.csv", "workers/data.txt", "lib/workers.py", "workers_2.py", "my/cluster/__init__.py"]
)
def test_what_hides_nothing_may_have_such_a_name(folder, name):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("")
    assert name in names(pack(folder, "train"))


def test_a_command_may_have_any_module(folder):
    (folder / "workers.py").write_text("")
    assert "workers.py" in names(pack(folder, "run"))


def test_a_huge_folder_is_refused_by_what_makes_it_huge(folder, monkeypatch):
    monkeypatch.setattr(code_archive, "LIMIT_BYTES", 2 << 20)
    (folder / "data").mkdir()
    (folder / "data" / "a.bin").write_bytes(bytes(3 << 20))
    with pytest.raises(SpecError, match=r"over 2 MiB.*largest so far: data \(3 MiB\)") as caught:
        pack(folder)
    assert "write /data into .polyfleetignore" in caught.value.remedy
    assert f"uri: {folder / 'data'}, mount: data/}}" in caught.value.remedy


def test_too_many_files_are_refused_before_all_are_counted(folder, monkeypatch):
    monkeypatch.setattr(code_archive, "LIMIT_FILES", 1)
    with pytest.raises(SpecError, match="MiB, 1 files or"):
        pack(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_cannot_be_read_is_named(folder):
    (folder / "secret").write_text("s")
    (folder / "secret").chmod(0)
    with pytest.raises(UserError, match="secret cannot be packed"):
        pack(folder)


def test_a_full_disk_leaves_no_archive(folder):
    with pytest.raises(UserError, match="cannot be packed"):
        code_archive.pack(folder, "run", folder / "absent" / "a.zip")

"""A folder becomes one archive, always the same; what must not travel is left out or refused with a sentence."""

import os
import zipfile

import pytest

from cluster.errors import SpecError, UserError
from orchestrator import bundle


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "project"
    (folder / "lib").mkdir(parents=True)
    (folder / "train.py").write_text("def train(ctx): ...")
    (folder / "lib" / "model.py").write_text("x = 1")
    return folder


def pack(folder, task="train"):
    return bundle.pack(folder, task, folder.parent / "package.zip")


def names(package):
    with zipfile.ZipFile(package.path) as zipped:
        return zipped.namelist()


def test_the_same_folder_gives_the_same_bytes_whenever_and_wherever(folder, tmp_path):
    first = pack(folder)
    other = tmp_path / "elsewhere" / "copy"
    other.mkdir(parents=True)
    (other / "lib").mkdir()
    for name in ("lib/model.py", "train.py"):
        (other / name).write_text((folder / name).read_text())
        os.utime(other / name, (1, 1))
    assert pack(other).sha == first.sha
    (other / "train.py").write_text("def train(ctx): pass")
    assert pack(other).sha != first.sha


def test_files_arrive_whole_with_their_executable_bit(folder):
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o700)
    package = pack(folder)
    with zipfile.ZipFile(package.path) as zipped:
        assert zipped.read("lib/model.py") == b"x = 1"
        modes = {info.filename: info.external_attr >> 16 & 0o777 for info in zipped.infolist()}
    assert modes == {"lib/model.py": 0o644, "run.sh": 0o755, "train.py": 0o644}
    assert (package.files, package.bytes) == (3, len("#!/bin/sh\n") + len("x = 1") + len("def train(ctx): ..."))


def test_history_caches_environments_and_compiled_files_stay_here(folder):
    for skipped in (".git/config", "__pycache__/a.pyc", ".venv/bin/python", "lib/node_modules/x.js", "old.pyc"):
        path = folder / skipped
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    assert names(pack(folder)) == ["lib/model.py", "train.py"]


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(SpecError, match=r"working_dir: .*/absent does not exist"):
        bundle.pack(tmp_path / "absent", "run", tmp_path / "a.zip")


def test_a_file_is_no_folder(folder):
    with pytest.raises(SpecError, match="is not a folder"):
        pack(folder / "train.py")


def test_a_link_inside_the_folder_is_followed(folder):
    (folder / "alias.py").symlink_to("lib/model.py")
    (folder / "also").symlink_to("lib")
    assert names(pack(folder)) == ["alias.py", "also/model.py", "lib/model.py", "train.py"]


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


def test_a_link_to_nothing_and_a_circle_of_links_are_refused(folder):
    (folder / "gone").symlink_to("absent")
    with pytest.raises(SpecError, match="link to nothing"):
        pack(folder)
    (folder / "gone").unlink()
    (folder / "lib" / "up").symlink_to("..")
    with pytest.raises(SpecError, match="link to a folder it is in"):
        pack(folder)


def test_the_working_folder_itself_may_be_a_link(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    assert names(bundle.pack(tmp_path / "link", "run", tmp_path / "a.zip")) == ["lib/model.py", "train.py"]


def test_a_pipe_is_refused_and_not_read(folder):
    os.mkfifo(folder / "pipe")
    with pytest.raises(SpecError, match="neither a file nor a folder"):
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
    monkeypatch.setattr(bundle, "LIMIT_BYTES", 2 << 20)
    (folder / "data").mkdir()
    (folder / "data" / "a.bin").write_bytes(bytes(3 << 20))
    with pytest.raises(SpecError, match=r"over 2 MiB.*largest so far: data \(3 MiB\)"):
        pack(folder)


def test_too_many_files_are_refused_before_all_are_counted(folder, monkeypatch):
    monkeypatch.setattr(bundle, "LIMIT_FILES", 1)
    with pytest.raises(SpecError, match="or 1 files"):
        pack(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_cannot_be_read_is_named(folder):
    (folder / "secret").write_text("s")
    (folder / "secret").chmod(0)
    with pytest.raises(UserError, match="secret cannot be packed"):
        pack(folder)


def test_a_full_disk_leaves_no_archive(folder):
    with pytest.raises(UserError, match="cannot be packed"):
        bundle.pack(folder, "run", folder / "absent" / "a.zip")

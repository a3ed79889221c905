"""The newest epoch of a job, as a file: what it holds, and what is not taken for one."""

import os
import threading
from functools import partial
from pathlib import Path

import pytest

from cluster.errors import UserError
from cluster.host import fences
from cluster.input.untrusted_files import UnreadableFile


def test_a_fence_is_read_as_it_was_raised(tmp_path: Path):
    assert fences.read(tmp_path, "job-1") is None
    fences.raise_to(tmp_path, "job-1", 3)
    assert fences.read(tmp_path, "job-1") == 3 and fences.read(tmp_path, "job-2") is None
    assert (tmp_path / "job-1").read_bytes() == b"3\n"
    assert [p.name for p in tmp_path.iterdir()] == ["job-1"]


def test_a_fence_is_never_lowered(tmp_path: Path):
    for epoch in (2, 7, 5):
        fences.raise_to(tmp_path, "job", epoch)
    assert fences.read(tmp_path, "job") == 7
    fences.write(tmp_path, "job", 6)  # by the one who raised it too far
    assert fences.read(tmp_path, "job") == 6


def test_a_fence_is_forgotten_once_and_again(tmp_path: Path):
    fences.raise_to(tmp_path, "job", 1)
    for _ in range(2):
        fences.remove(tmp_path, "job")
        assert fences.read(tmp_path, "job") is None


@pytest.mark.parametrize("job", ["", ".", "..", "../up", "a/b", ".job.part", "a\n", "a" * 129, "é"])
def test_what_is_no_jobs_id_names_no_file(tmp_path: Path, job: str):
    for use in (fences.read, fences.remove, partial(fences.raise_to, epoch=1), partial(fences.write, epoch=1)):
        with pytest.raises(UserError, match="cannot be a job's id"):
            use(tmp_path, job)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text", [b"", b"3", b" 3\n", b"3\n\n", b"-1\n", b"03\n", b"3.0\n", b"\xd9\xa3\n", b"9" * 19 + b"\n"]
)
def test_another_text_is_no_epoch(tmp_path: Path, text: bytes):
    (tmp_path / "job").write_bytes(text)
    with pytest.raises(UnreadableFile, match="does not contain an epoch"):
        fences.read(tmp_path, "job")
    fences.raise_to(tmp_path, "job", 4)
    assert fences.read(tmp_path, "job") == 4


def test_links_and_pipes_are_not_followed(tmp_path: Path):
    (tmp_path / "real").mkdir()
    fences.raise_to(tmp_path / "real", "job", 4)
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "alias").symlink_to("job")
    os.mkfifo(tmp_path / "real" / "pipe")
    for folder, job in ((tmp_path / "linked", "job"), (tmp_path / "real", "alias"), (tmp_path / "real", "pipe")):
        with pytest.raises(UnreadableFile):
            fences.read(folder, job)
    fences.raise_to(tmp_path / "real", "alias", 9)
    assert fences.read(tmp_path / "real", "job") == 4 and fences.read(tmp_path / "real", "alias") == 9


def test_a_reader_sees_the_old_epoch_or_the_new(tmp_path: Path):
    fences.raise_to(tmp_path, "job", 1)
    seen: list[int | None] = []
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            seen.append(fences.read(tmp_path, "job"))

    reader = threading.Thread(target=read)
    reader.start()
    for epoch in range(2, 300):
        fences.raise_to(tmp_path, "job", epoch)
    ended.set()
    reader.join()
    assert None not in seen and seen == sorted(seen)

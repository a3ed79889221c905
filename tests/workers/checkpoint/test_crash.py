"""A save stopped at every one of its file operations, by death and by error, and what the order of them promises."""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from workers.checkpoint import list_checkpoints, load, prune, save, verify
from workers.checkpoint.disk.files import Files, OpenFile
from workers.checkpoint.disk.retention import INCOMING_AGE_S, LEFTOVER_AGE_S
from workers.checkpoint.format.manifest import NAME
from workers.errors import CheckpointError


def state(step: int) -> dict[str, Any]:
    a, b = torch.full((2_500_000,), float(step)), torch.full((3,), step)  # two chunks, from two threads
    return {"t": {"a": a, "b": b}, "extra": {"step": step}}


class Watched(Files):
    """Real operations, each told to `watch` before it happens."""

    def __init__(self, watch: Callable[[str, tuple[Any, ...]], None]):
        self.watch = watch

    def __getattribute__(self, name: str) -> Any:
        operation = super().__getattribute__(name)
        if name not in vars(Files):
            return operation

        def watched(*arguments: Any) -> Any:
            self.watch(name, arguments)
            return operation(*arguments)

        return watched


@pytest.mark.parametrize("how", ["before", "half"])
def test_death_at_any_operation_leaves_the_old_or_the_new_and_never_a_mixture(how, tmp_path, bits):
    driver = Path(__file__).with_name("crash_driver.py")
    done = subprocess.run([sys.executable, driver, tmp_path, how], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    operations, step = map(int, done.stdout.split())
    assert (operations > 15, step) == (True, 2)
    seen = []
    for last in range(operations):
        loaded = load(tmp_path / f"{last:03d}")
        assert bits(loaded.state) == bits(state(loaded.step)), last
        assert loaded.report.skipped == [], last
        seen.append(loaded.step)
        before = [line["step"] for line in list_checkpoints(tmp_path / f"{last:03d}")]
        save(tmp_path / f"{last:03d}", 3, state(3), keep=2)
        assert [line["step"] for line in list_checkpoints(tmp_path / f"{last:03d}")] == [3, before[0]], last
    assert seen == sorted(seen)  # one point of no return: old before it, new after it
    assert set(seen) == {1, 2}


def count_operations(root: Path) -> int:
    operations: list[str] = []
    save(root, 1, state(1))
    save(root, 2, state(2), keep=1, files=Watched(lambda name, _: operations.append(name)))
    return len(operations)


def test_an_error_at_any_operation_leaves_the_old_and_nothing_else(tmp_path, bits):
    failed = 0
    for last in range(count_operations(tmp_path / "count")):
        root = tmp_path / str(last)
        old = save(root, 1, state(1))
        left = [last]

        def full(name: str, arguments: tuple[Any, ...], left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == -1:
                raise OSError(errno.ENOSPC, "No space left on device")

        try:
            saved = save(root, 2, state(2), keep=1, files=Watched(full))
        except CheckpointError as e:
            failed += 1
            assert e.message == f"cannot save step 2 in {root}: No space left on device"
            assert list(root.iterdir()) == [old.path]
            assert bits(load(root).state) == bits(state(1))
        else:
            assert verify(saved.path)["ok"]
            assert "could not be deleted: No space left" in saved.notes[0]
            assert load(root).step == 2
    assert failed > 8


def test_everything_is_durable_before_the_manifest_appears_and_nothing_old_goes_before(tmp_path):
    log: list[tuple[str, ...]] = []

    def note(name: str, arguments: tuple[Any, ...]) -> None:
        paths = [a.path if isinstance(a, OpenFile) else a for a in arguments if isinstance(a, OpenFile | Path)]
        log.append((name, *(path.name for path in paths)))

    save(tmp_path, 1, state(1))
    new = save(tmp_path, 2, state(2), keep=1, files=Watched(note)).path.name
    old = next(entry[1] for entry in log if entry[0] == "remove_folder")
    assert [entry for entry in log if entry[0] != "write"] == [
        ("make_folder", f".part-{new}"),
        ("create", "shard-00001.safetensors"),
        ("finish", "shard-00001.safetensors"),
        ("sync_folder", f".part-{new}"),
        ("rename", f".part-{new}", new),
        ("sync_folder", tmp_path.name),
        ("create", f".{NAME}.part"),
        ("finish", f".{NAME}.part"),
        ("rename", f".{NAME}.part", NAME),
        ("sync_folder", new),
        ("remove", NAME),
        ("sync_folder", old),
        ("remove", "shard-00001.safetensors"),
        ("remove_folder", old),
    ]


def steps(root: Path) -> list[int]:
    return [line["step"] for line in list_checkpoints(root)]


def test_retention_keeps_the_newest_and_always_the_one_just_written(tmp_path):
    for step in (10, 20, 30, 40):
        save(tmp_path, step, state(step), keep=3)
    assert steps(tmp_path) == [40, 30, 20]
    save(tmp_path, 15, state(15), keep=3)  # somebody went back
    assert steps(tmp_path) == [40, 30, 15]
    save(tmp_path, 16, state(16))
    assert steps(tmp_path) == [40, 30, 16, 15]


def test_a_damaged_checkpoint_does_not_count_among_those_kept(tmp_path):
    for step in (1, 2, 3):
        saved = save(tmp_path, step, state(step))
    os.truncate(saved.path / "shard-00001.safetensors", 10)
    save(tmp_path, 4, state(4), keep=2)
    assert steps(tmp_path) == [4, 3, 2]
    assert load(tmp_path, step=2).state["extra"] == {"step": 2}


def test_the_later_of_two_saves_of_one_step_is_the_newest(tmp_path):
    first = save(tmp_path, 1, {"extra": "first"})
    os.utime(first.path / NAME, (1, 1))
    save(tmp_path, 1, {"extra": "second"})
    assert load(tmp_path).state == load(tmp_path, step=1).state == {"extra": "second"}


@pytest.mark.parametrize("tidy", ["save", "prune"])
def test_leftovers_of_dead_writers_go_and_those_of_living_ones_stay(tidy, tmp_path):
    an_hour, a_week = LEFTOVER_AGE_S + 60, INCOMING_AGE_S + 60
    ages = {
        ".part-step-00000001-00000000": an_hour, "step-00000001-00000000": an_hour, ".part-step-00000002-00000000": 0,
        ".incoming-step-00000003-00000000": a_week, ".incoming-step-00000004-00000000": an_hour, "notes": a_week,
    }  # fmt: skip
    for name, age_s in ages.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard-00001.safetensors").touch()
        then = time.time() - age_s
        os.utime(tmp_path / name / "shard-00001.safetensors", (then, then))
        os.utime(tmp_path / name, (then, then))
    saved = save(tmp_path, 5, state(5), keep=1 if tidy == "save" else None)
    if tidy == "prune":
        assert len(prune(tmp_path, 1)["deleted"]) == 3
    stay = {".part-step-00000002-00000000", ".incoming-step-00000004-00000000", "notes", saved.path.name}
    assert {path.name for path in tmp_path.iterdir()} == stay


def test_an_attempt_that_was_replaced_may_not_save(tmp_path):
    save(tmp_path, 10, state(10), attempt="mnist-1a2b3c.2", kind="tpu:emulated")
    with pytest.raises(CheckpointError, match=r"attempt 1 of job mnist-1a2b3c may not save: attempt 2 has saved step-"):
        save(tmp_path, 11, state(11), attempt="mnist-1a2b3c.1")
    save(tmp_path, 11, state(11), attempt="another-1.1")
    save(tmp_path, 12, state(12), attempt="mnist-1a2b3c.3")
    assert steps(tmp_path) == [12, 11, 10]


def test_a_folder_that_cannot_be_written_is_an_error_with_its_name(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot save step 1 in .*/file: File exists"):
        save(tmp_path / "file", 1, state(1))


def test_too_little_space_is_said_before_anything_is_written(tmp_path):
    free = os.statvfs(tmp_path)
    huge = torch.empty(1).expand(free.f_bavail * free.f_frsize // 4 + 1_000_000_000)
    with pytest.raises(
        CheckpointError, match=r"step 1 needs [\d,]+ bytes, the disk of .* has [\d,]+ free; free disk space"
    ):
        save(tmp_path / "root", 1, {"t": huge})
    assert list((tmp_path / "root").iterdir()) == []

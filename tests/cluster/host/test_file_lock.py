"""Locks of files: children inherit them."""

import subprocess

from cluster.host import file_lock


def test_a_released_lock_is_free_although_a_child_still_has_the_descriptor(tmp_path):
    path = tmp_path / "lock"
    with path.open("w") as file:
        assert file_lock.acquire(file)
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[file.fileno()])
        file_lock.release(file.fileno())
    try:
        assert not file_lock.is_locked(path)
    finally:
        child.communicate()


def test_a_lock_that_is_only_closed_is_held_by_a_child_that_inherited_it(tmp_path):
    path = tmp_path / "lock"
    with path.open("w") as file:
        assert file_lock.acquire(file)
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[file.fileno()])
    try:
        assert file_lock.is_locked(path)
    finally:
        child.communicate()
    assert not file_lock.is_locked(path)

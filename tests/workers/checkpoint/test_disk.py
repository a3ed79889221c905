"""Where bytes go past the page cache, and where a mount does not let them."""

import errno
import os
import tempfile
from pathlib import Path

import pytest
import torch

from workers.checkpoint import load, save, verify
from workers.checkpoint.disk import files
from workers.checkpoint.disk.files import Files
from workers.errors import CheckpointError

DIRECT = getattr(os, "O_DIRECT", 0)
STATE = {"t": {"big": torch.arange(5_000_001, dtype=torch.int32), "odd": torch.ones(3, dtype=torch.uint8)}}


def intact(root):
    loaded = load(root).state["t"]
    return verify(next(root.glob("step-*")))["ok"] and all(torch.equal(loaded[n], t) for n, t in STATE["t"].items())


@pytest.mark.skipif(not DIRECT, reason="this system has no O_DIRECT")
def test_large_files_bypass_the_page_cache_and_are_exactly_as_long_as_they_should_be(tmp_path):
    seen = []

    class Noting(Files):
        def finish(self, file):
            seen.append((file.direct, file.size_bytes % files.PAGE_BYTES != 0))
            super().finish(file)

    saved = save(tmp_path, 1, STATE, files=Noting())
    if not seen[0][0]:
        pytest.skip("this mount refuses O_DIRECT")
    assert seen[0] == (True, True)
    assert next(saved.path.glob("*.safetensors")).stat().st_size == saved.bytes
    assert intact(tmp_path)


@pytest.mark.skipif(not DIRECT, reason="this system has no O_DIRECT")
@pytest.mark.parametrize("where", ["open", "pwrite", "fallocate"])
def test_a_mount_that_refuses_direct_writes_gets_buffered_ones(where, tmp_path, monkeypatch):
    real_open, real_write, refused = os.open, os.pwrite, []

    def refusing_open(path, flags, *rest, **named):
        if flags & DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *rest, **named)

    def refusing_write(descriptor, data, offset):
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & DIRECT:
            refused.append(descriptor)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(descriptor, data, offset)

    def refusing_fallocate(descriptor, offset, size):
        refused.append(descriptor)
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    with monkeypatch.context() as patched:
        if where == "open":
            patched.setattr(os, "open", refusing_open)
        elif where == "pwrite":
            patched.setattr(os, "pwrite", refusing_write)
        else:
            patched.setattr(os, "posix_fallocate", refusing_fallocate)
        save(tmp_path, 1, STATE)
    assert refused
    assert intact(tmp_path)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs here")
def test_memory_file_systems_work_too():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        save(Path(folder), 1, STATE)
        assert intact(Path(folder))


def test_a_full_disk_is_noticed_before_the_first_byte_and_nothing_is_left(tmp_path, monkeypatch):
    def full(descriptor, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    save(tmp_path, 1, {"t": 1})
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(CheckpointError, match=r"cannot save step 2 in .*: No space left on device"):
        save(tmp_path, 2, STATE)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_disk_that_cannot_read_is_named_with_file_and_byte(tmp_path, monkeypatch):
    saved = save(tmp_path, 1, STATE)
    real = os.preadv

    def failing(descriptor, buffers, offset, *rest):
        if offset >= 8 << 20:
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, buffers, offset, *rest)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(
        CheckpointError, match=r"shard-00001\.safetensors cannot be read at byte \d+: Input/output error"
    ):
        load(saved.path)
    assert "Input/output error" in verify(saved.path)["problems"][0]

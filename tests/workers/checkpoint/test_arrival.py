"""Bytes are proved on the disk while others arrive: what is wrong is named, and nothing counts before all of it is."""

import errno
import os
import threading

import numpy as np
import pytest

from cluster.errors import FleetError
from workers.checkpoint import save, verify
from workers.checkpoint.disk.files import Files
from workers.checkpoint.format.manifest import CHUNK_BYTES
from workers.checkpoint.transfer.copier import copy
from workers.checkpoint.transfer.readback import MIN_BATCH, ReadBack
from workers.checkpoint.transfer.receiver import CheckpointReceiver
from workers.errors import CheckpointError
from workers.storage.checkpoint_uploads import CheckpointUploads
from workers.storage.pool_storage import PoolStorage

CHUNKS = 2 * MIN_BATCH + 1
"""Of the checkpoint: two turns of the thread that reads back, and a last chunk of a few bytes."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    numbers = np.arange(2 * MIN_BATCH * CHUNK_BYTES // 4, dtype=np.int32)
    return save(tmp_path_factory.mktemp("arrival"), 1, {"t": {"large": numbers}}).path


@pytest.fixture
def sent(source):
    """The manifest, the one file and its chunks."""
    [shard] = source.glob("*.safetensors")
    data = memoryview(shard.read_bytes())
    chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    assert len(chunks) == CHUNKS
    assert 0 < len(chunks[-1]) < CHUNK_BYTES
    return (source / "MANIFEST.json").read_bytes(), shard.name, chunks


def incoming(source, sent, target, files=None):
    return CheckpointReceiver(target, source.name, sent[0], files)


def arrive(one, sent, numbers):
    for number in numbers:
        one.write((sent[1], number), sent[2][number])


def is_whole(target, source):
    return verify(target / source.name)["ok"] and not list(target.glob(".incoming-*"))


def test_most_chunks_are_proved_before_the_last_one_has_come_and_commit_reads_only_the_rest(source, sent, tmp_path):
    proved = []
    with incoming(source, sent, tmp_path) as one:
        prove = one._read_back._verify

        def noting(chunks):
            prove(chunks)
            proved.append((len(chunks), threading.current_thread().name))

        one._read_back._verify = noting
        assert len(one.missing()) == CHUNKS
        arrive(one, sent, range(MIN_BATCH))
        one._read_back._raise_error()
        assert [count for count, _ in proved] == [MIN_BATCH]
        arrive(one, sent, range(MIN_BATCH, CHUNKS))
        one.commit()
    assert sum(count for count, _ in proved) == CHUNKS
    assert all(name.startswith("read-back") for _, name in proved)
    assert is_whole(tmp_path, source)


def test_chunks_may_arrive_in_any_order_and_twice(source, sent, tmp_path):
    with incoming(source, sent, tmp_path) as one:
        one.missing()
        arrive(one, sent, [*reversed(range(CHUNKS)), 3, CHUNKS - 1])
        one.commit()
    assert is_whole(tmp_path, source)


@pytest.mark.parametrize("buffered", [False, True], ids=["direct", "buffered"])
def test_a_byte_that_the_disk_changes_is_found_and_its_chunk_is_named(buffered, source, sent, tmp_path, monkeypatch):
    if buffered:
        monkeypatch.setattr("workers.checkpoint.disk.files._O_DIRECT", 0)

    class Rotting(Files):
        def write(self, file, buffer, size_bytes, offset):
            if offset == 2 * CHUNK_BYTES:
                buffer[5000] ^= 1
            super().write(file, buffer, size_bytes, offset)

    with incoming(source, sent, tmp_path, Rotting()) as one:
        one.missing()
        with pytest.raises(CheckpointError, match=rf"chunk 3 of {CHUNKS} does not read back as it was written"):
            arrive(one, sent, range(CHUNKS))
            one.commit()
        with pytest.raises(CheckpointError, match=f"chunk 3 of {CHUNKS}"):
            one.commit()
    assert not list(tmp_path.glob("step-*"))
    with incoming(source, sent, tmp_path) as again:
        assert (sent[1], 2) in again.missing()


def test_what_a_cut_left_is_read_back_and_only_the_rest_is_asked_for(source, sent, tmp_path):
    with incoming(source, sent, tmp_path) as one:
        one.missing()
        arrive(one, sent, range(MIN_BATCH + 1))
    shard = tmp_path / f".incoming-{source.name}" / sent[1]
    with shard.open("r+b") as file:
        file.seek(CHUNK_BYTES + 7)
        file.write(b"?")
    with incoming(source, sent, tmp_path) as again:
        rest = [1, *range(MIN_BATCH + 1, CHUNKS)]
        assert again.missing() == [(sent[1], number) for number in rest]
        arrive(again, sent, rest)
        again.commit()
    assert is_whole(tmp_path, source)


def test_killed_between_two_chunks_what_was_written_is_used(source, sent, tmp_path):
    child = os.fork()
    if child == 0:
        with incoming(source, sent, tmp_path) as one:
            one.missing()
            arrive(one, sent, range(MIN_BATCH + 2))
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not list(tmp_path.glob("step-*"))
    assert copy(source, tmp_path)["transferred_bytes"] == sum(map(len, sent[2][MIN_BATCH + 2 :]))
    assert is_whole(tmp_path, source)


def test_a_commit_without_all_chunks_makes_no_checkpoint(source, sent, tmp_path):
    with incoming(source, sent, tmp_path) as one:
        one.missing()
        arrive(one, sent, range(CHUNKS - 1))
        with pytest.raises(CheckpointError, match=f"chunk {CHUNKS} of {CHUNKS} does not read back"):
            one.commit()
    assert not list(tmp_path.glob("step-*"))


def test_an_error_of_the_disk_is_raised_by_every_later_call():
    def fails(chunks):
        raise OSError(28, "No space left on device")

    after = ReadBack(fails)
    for number in range(MIN_BATCH):
        after.add(("a", number))
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            after.finish()
    with pytest.raises(OSError, match="No space left"):
        after.add(("a", MIN_BATCH))
    after.close()


def test_nothing_to_prove_needs_no_thread():
    after = ReadBack(lambda chunks: pytest.fail("nothing was written"))
    after.finish()
    after.close()


def test_a_checkpoint_whose_only_tensor_is_empty_arrives(tmp_path):
    one = save(tmp_path / "source", 1, {"t": {"none": np.zeros(0, np.float32)}}).path
    assert copy(one, tmp_path / "target")["verified"]
    assert verify(tmp_path / "target" / one.name)["ok"]


def test_a_full_disk_is_told_with_what_to_do_and_what_arrived_is_kept(source, sent, tmp_path, monkeypatch):
    arriving = CheckpointUploads(PoolStorage(tmp_path), "cpu")
    assert len(arriving.begin("job", source.name, sent[0])["missing"]) == CHUNKS
    arriving.write("job", source.name, sent[1], 0, sent[2][0])

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        monkeypatch.context() as patched,
        pytest.raises(FleetError, match=r"No space left on device; free disk space on that node"),
    ):
        patched.setattr(os, "pwrite", full)
        arriving.write("job", source.name, sent[1], 1, sent[2][1])
    arriving.close("job", source.name)
    assert arriving.begin("job", source.name, sent[0])["missing"] == [[sent[1], n] for n in range(1, CHUNKS)]
    arriving.close("job", source.name)

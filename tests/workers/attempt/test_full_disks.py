"""Disks that are really full: a small tmpfs as a rank's folder, or as the whole node's."""

import errno
import os
import subprocess
from contextlib import suppress

import pytest
import torch

from cluster.errors import Conflict, FleetError
from cluster.host import fences
from workers.attempt import attempt
from workers.devices import backends
from workers.errors import CheckpointError
from workers.protocol import lease
from workers.protocol.fence import FenceReader
from workers.storage.code_archives import NodeCodeArchives
from workers.tasks import rank_main
from workers.tasks.context import Context

FILLS = """
with open("{folder}/data", "wb") as f:
    while True:
        f.write(bytes(1 << 16))
        f.flush()
"""


@pytest.fixture
def small(tmp_path, request):
    """A file system of 2 MiB, or with the options of `@limits`: its folder."""
    folder, options = tmp_path / "small", getattr(request, "param", "size=2m")
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]).returncode:
        pytest.skip("a file system can be mounted by root alone")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def full(node, small):
    """A node whose attempts all lie on the small file system."""
    (small / "storage").mkdir()
    node.root, node.packages = small, NodeCodeArchives(small / "packages")
    node.reopen()
    return node


def fill(folder):
    with suppress(OSError), (folder / "fill").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_start_that_a_full_disk_refused_is_stopped_once_its_fence_stands(full, small, tmp_path):
    """Else its job would wait for ever: its node answers, and cannot note that it never starts."""
    full.fences = FenceReader("fleet", tmp_path)
    full.reopen()
    fill(small)
    with pytest.raises(FleetError, match="cannot create the attempt's folder"):
        full.start("j")
    with pytest.raises(FleetError, match="cannot record that attempt"):
        full.attempts.stop("j", 1, "fence")
    fences.write(tmp_path, "j", 2)
    full.attempts.stop("j", 1, "fence")
    with pytest.raises(Conflict):
        full.start("j")


FILES = "n = 0\nwhile True:\n    n += 1\n    open(str(n), 'w').close()\n"


@pytest.mark.parametrize("small", ["size=64m,nr_inodes=400"], indirect=True)
def test_a_job_that_used_up_the_files_of_its_nodes_disk_is_forgotten_and_the_disk_recovers(full, small):
    """The mark of what is forgotten takes a file as well."""
    full.python("j", FILES)
    assert full.outcome()["failure"]["kind"] == "storage"
    for part in range(400):
        try:
            (small / f"fill-{part}").touch()  # what the attempt's end has given back
        except OSError:
            break
    full.until(lambda: forgotten(full), "it is forgotten")
    assert not full.folder().shared.exists()
    full.reopen()
    full.until(lambda: forgotten(full), "it is forgotten again")
    assert full.attempts.keys() == []
    full.until(lambda: not list(small.glob("shared/.removed-*")), "its files are gone")
    full.start("next")
    assert full.outcome("next")["state"] == "succeeded"


def forgotten(node):
    """As the server asks again, while the files on the full disk are being removed."""
    try:
        node.attempts.remove_rank_files("j", 1)
    except (OSError, FleetError):
        return False
    return True


def test_an_attempt_whose_folder_went_before_it_was_marked_as_forgotten_can_be_forgotten_again(node, monkeypatch):
    """The agent is killed, or the disk is full, between the two."""
    node.start()
    node.outcome()
    with monkeypatch.context() as full_disk, pytest.raises(OSError, match="No space"):
        full_disk.setattr(attempt, "replace_text", no_space)
        node.attempts.remove_rank_files("j", 1)
    assert not node.folder().shared.exists()
    (report,) = node.reopen().wait_for_changes({}, {}, 0.0)
    assert (report.phase, report.outcome.state) == ("ended", "succeeded")
    node.attempts.remove_rank_files("j", 1)
    assert node.attempts.keys() == []
    assert node.reopen().keys() == []


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_start_that_finds_no_space_for_its_first_file_says_so_and_leaves_nothing(node, monkeypatch):
    with monkeypatch.context() as full_disk, pytest.raises(FleetError, match="cannot create the attempt's folder") as e:
        full_disk.setattr(lease, "try_lock", no_space)
        node.start()
    assert e.value.remedy == "free disk space on that node"
    assert (node.attempts.keys(), node.folder().path.exists()) == ([], False)
    node.start()
    assert node.outcome()["state"] == "succeeded"


@pytest.mark.parametrize("small", ["size=64m,nr_inodes=400"], indirect=True)
def test_a_start_on_a_disk_without_a_file_left_says_so(full, small):
    with pytest.raises(OSError, match="No space"):
        for part in range(400):
            (small / f"fill-{part}").touch()
    with pytest.raises(FleetError, match=r"cannot create the attempt's folder: .*No space"):
        full.start()
    assert full.attempts.keys() == []
    for fill in small.glob("fill-*"):
        fill.unlink()
    full.start()
    assert full.outcome()["state"] == "succeeded"


def test_a_script_that_fills_a_disk_is_told_with_the_file_system_and_what_is_free(node, small):
    node.python("j", FILLS.format(folder=small), environment={"TMPDIR": str(small)})
    failure = node.outcome()["failure"]
    assert (failure["kind"], failure["rank"], failure["node"], failure["exit_code"]) == ("storage", 0, "n0", 1)
    assert "OSError: [Errno 28] No space left on device" in failure["message"]
    assert f"{small} is full: 0 bytes of 2.0 MiB are free" in failure["message"]


def test_a_command_that_fails_without_saying_why_on_a_full_disk_is_told_as_storage(node, small):
    node.start(
        command=("sh", "-c", f"head -c 4000000 /dev/zero 2>/dev/null > {small}/x; exit 3"),
        environment={"TMPDIR": str(small)},
    )
    failure = node.outcome()["failure"]
    assert (failure["kind"], failure["exit_code"]) == ("storage", 3)
    assert f"{small} is full" in failure["message"]


def test_a_failure_beside_a_disk_that_is_not_full_stays_the_users(node, small):
    node.python("j", "raise SystemExit('boom')", environment={"TMPDIR": str(small)})
    assert node.outcome()["failure"]["kind"] == "user"


def test_a_training_whose_writer_does_not_say_why_is_told_as_storage_with_its_traceback(node, small):
    """torch.save raises "unexpected pos"."""
    text = f"import torch\ndef train(ctx):\n    torch.save(torch.zeros(1 << 20), '{small}/x.pt')\n"
    node.train(text, environment={"TMPDIR": str(small)})
    failure = node.outcome()["failure"]
    assert failure["kind"] == "storage", failure
    assert "inline_container" in failure["message"]
    assert f"{small} is full" in failure["message"]
    assert "in train" in failure["traceback"]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_checkpoint_that_a_disk_has_no_space_for_is_told_as_storage(small, asynchronous):
    ctx = Context(backends.create("cpu"), checkpoint_root=str(small / "c"))
    with pytest.raises(CheckpointError) as raised:
        ctx.checkpoint.save(1, {"x": torch.zeros(1 << 20)}, asynchronous=asynchronous)
        ctx.checkpoint.wait()
    told = rank_main.failure_record(raised.value, 0)
    assert told["kind"] == "storage"
    assert f"the file system of {small} has 2.0 MiB of 2.0 MiB free" in told["message"]


def test_an_error_that_names_its_file_names_the_file_system_of_that(small):
    with pytest.raises(OSError, match="No space") as raised, (small / "x").open("wb") as f:
        f.write(bytes(4 << 20))
    assert rank_main.failure_record(raised.value, 0)["kind"] == "storage"
    assert rank_main.failure_record(ValueError("x"), 0)["kind"] != "storage"


def test_a_job_that_fills_its_nodes_disk_ends_as_failed_for_storage_with_rank_and_node(full, small):
    """Ranks, their logs and the attempt's records all lie there."""
    full.python("j", FILLS.format(folder="."))
    ended = full.outcome()
    failure = ended["failure"]
    assert (ended["state"], failure["kind"], failure["rank"], failure["node"]) == ("failed", "storage", 0, "n0")
    assert f"{small} is full" in failure["message"]


def test_a_supervisor_that_a_full_disk_ended_is_told_as_storage(full, small):
    """It cannot even say that it is there: its record does not fit."""
    full.python("j", "import time; print('ready', flush=True); time.sleep(600)")
    full.until_printed("ready")
    with (small / "fill").open("wb", buffering=0) as f, pytest.raises(OSError, match="No space left"):
        while True:
            f.write(bytes(4096))
    os.kill(full.supervisor_pid(), 9)
    ended = full.outcome()
    assert (ended["state"], ended["failure"]["kind"]) == ("lost", "storage")

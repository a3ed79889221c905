"""Archives on their way to nodes, and what a launch says of a node that refuses."""

import hashlib
import io
import os
import threading
import zipfile

import pytest

from cluster.errors import Conflict, FleetError, PolyfleetError
from orchestrator.core.controller.commands import Launch
from orchestrator.runtime.controller.launch import _failed
from orchestrator.runtime.files.code_archives import PIECE_BYTES
from orchestrator.runtime.files.code_archives import ServerCodeArchives as ServerPackages
from workers.errors import ControllerSuperseded, EpochPast
from workers.storage.code_archives import NodeCodeArchives as NodePackages

HANG_S = 120.0


class Calls:
    """Calls to the archives of one node, made in this process and not through Ray. A second piece takes its time."""

    def __init__(self, packages):
        self.packages, self.pieces = packages, 0

    def call(self, node, method, *args, timeout_s=0.0):
        if method == "has_code_archive":
            return self.packages.has(*args)
        self.pieces += 1
        if args[1]:
            threading.Event().wait(0.2)
        return self.packages.put(*args)


@pytest.fixture
def large(tmp_path):
    """(Archives of a server, the digest of one of three pieces)."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("data.bin", os.urandom(2 * PIECE_BYTES))
    file, packages = tmp_path / "upload", ServerPackages(tmp_path / "server")
    file.write_bytes(data.getvalue())
    sha = hashlib.sha256(data.getvalue()).hexdigest()
    packages.store(sha, file)
    return packages, sha


def test_two_launches_send_the_same_archive_to_a_node_one_after_the_other(large, tmp_path):
    packages, sha = large
    node, errors = NodePackages(tmp_path / "node"), []
    calls = Calls(node)

    def send():
        try:
            packages.send(sha, "a", calls)
        except PolyfleetError as e:
            errors.append(e)

    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert (errors, node.has(sha), calls.pieces) == ([], True, 3)


def launch(epoch=3):
    return Launch("j", epoch, ("a",), (), ({},), "cpu", "place")


@pytest.mark.parametrize(
    "error",
    [
        Conflict("piece at byte 4194304 of an upload that has 8388608"),
        ControllerSuperseded(1, 2),
        FleetError("no answer"),
    ],
)
def test_what_says_nothing_of_epochs_is_no_sign_of_a_newer_attempt(error):
    told = _failed(launch(), error)
    assert (told.kind, told.newest_epoch) == ("launch", 0)


def test_a_node_that_knows_a_newer_epoch_says_which():
    told = _failed(launch(), EpochPast("attempt 3 of j was superseded: node a received attempt 7", 7))
    assert (told.kind, told.newest_epoch) == ("launch", 7)

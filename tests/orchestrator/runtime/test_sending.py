"""Archives on their way to nodes, and what a launch says of a node that refuses."""

import hashlib
import io
import os
import pickle
import subprocess
import sys
import threading
import zipfile
from contextlib import suppress
from dataclasses import replace

import pytest
from patience import LIMIT_S

from cluster.errors import Conflict, FleetError, PolyfleetError
from cluster.serialization import from_plain
from cluster.types import HostAddress, NodeFacts
from orchestrator.core.controller.commands import Launch
from orchestrator.runtime.checkpoints.bandwidth_limit import RateLimit
from orchestrator.runtime.controller.launch import _failed
from orchestrator.runtime.files.code_archives import PIECE_BYTES
from orchestrator.runtime.files.code_archives import ServerCodeArchives as ServerPackages
from workers.errors import ControllerSuperseded, EpochPast
from workers.storage.code_archives import NodeCodeArchives as NodePackages


class Calls:
    """Calls to the archives of one node, made in this process and not through Ray. A second piece takes its time."""

    server_address = HostAddress("server", "10.0.0.1")

    def __init__(self, packages):
        self.packages, self.pieces = packages, 0

    def facts_of(self, node):
        return None

    def call(self, node, method, *args, timeout_s=0.0):
        if method == "has_code_archive":
            return self.packages.has(*args)
        if method == "arrived_code_archive":
            return self.packages.arrived(*args)
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
        thread.join(LIMIT_S)
    assert (errors, node.has(sha), calls.pieces) == ([], True, 3)


class ArchiveProcess:
    """The archives of a node in a process of their own, which can be killed, as an agent's is; a call into it goes
    through a pipe and not through Ray. `sent`: (offset, bytes) of the pieces that it received.
    """

    server_address = HostAddress("server", "10.0.0.1")

    def __init__(self, folder, facts=None, lives_for_pieces=100):
        self.facts, self.left, self.sent = facts, lives_for_pieces, []
        command = [sys.executable, "-c", SERVE, str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def facts_of(self, node):
        return self.facts

    def call(self, node, method, *args, timeout_s=0.0):
        if method == "put_code_archive_part":
            if not self.left:
                self.kill()
            self.left -= 1
        try:
            pickle.dump((METHODS[method], args), self.process.stdin)
            self.process.stdin.flush()
            error, value = pickle.load(self.process.stdout)
        except (OSError, EOFError) as e:
            raise FleetError(f"node {node}: {method} could not be reached") from e
        if error:
            raise error
        if method == "put_code_archive_part":
            self.sent.append((args[1], len(args[2])))
        return value

    def kill(self):
        self.process.kill()
        self.process.wait(LIMIT_S)

    def close(self):
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):
                stream.close()


METHODS = {"has_code_archive": "has", "arrived_code_archive": "arrived", "put_code_archive_part": "put"}


SERVE = """
import pickle, sys
from pathlib import Path
from cluster.errors import PolyfleetError
from workers.storage.code_archives import NodeCodeArchives

node, replies = NodeCodeArchives(Path(sys.argv[1])), sys.stdout.buffer
while True:
    method, args = pickle.load(sys.stdin.buffer)
    try:
        pickle.dump((None, getattr(node, method)(*args)), replies)
    except PolyfleetError as e:
        pickle.dump((e, None), replies)
    replies.flush()
"""


@pytest.fixture
def start_node(tmp_path):
    """start_node(**options): the node's process, started anew in the folder of the one before."""
    processes = []

    def start(**options):
        processes.append(ArchiveProcess(tmp_path / "node", **options))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


def test_after_the_agent_was_killed_only_the_rest_of_an_archive_is_sent(large, start_node):
    packages, sha = large
    size_bytes = packages.path(sha).stat().st_size
    killed = start_node(lives_for_pieces=2)
    with pytest.raises(FleetError, match="put_code_archive_part could not be reached"):
        packages.send(sha, "a", killed)
    assert killed.sent == [(0, PIECE_BYTES), (PIECE_BYTES, PIECE_BYTES)]
    second = start_node()
    packages.send(sha, "a", second)
    assert second.sent == [(2 * PIECE_BYTES, size_bytes - 2 * PIECE_BYTES)]
    assert second.call("a", "has_code_archive", sha)


@pytest.mark.parametrize("more", [0, 3 * PIECE_BYTES], ids=["a byte of it", "more than the archive"])
def test_what_arrived_differs_from_the_archive_and_is_sent_again(large, start_node, tmp_path, more):
    packages, sha = large
    killed = start_node(lives_for_pieces=2)
    with pytest.raises(FleetError):
        packages.send(sha, "a", killed)
    with (tmp_path / "node" / f".incoming-{sha}").open("r+b") as f:
        f.seek(PIECE_BYTES)
        [byte] = f.read(1)
        f.seek(PIECE_BYTES)
        f.write(bytes([byte ^ 1]) + bytes(more))
    second = start_node()
    packages.send(sha, "a", second)
    assert [offset for offset, _ in second.sent] == [0, PIECE_BYTES, 2 * PIECE_BYTES]
    assert second.call("a", "has_code_archive", sha)


def test_an_archive_that_arrived_whole_before_the_kill_is_unpacked(large, start_node, tmp_path):
    packages, sha = large
    (tmp_path / "node").mkdir(mode=0o700)
    (tmp_path / "node" / f".incoming-{sha}").write_bytes(packages.path(sha).read_bytes())
    node = start_node()
    packages.send(sha, "a", node)
    assert node.sent == [(packages.path(sha).stat().st_size, 0)] and node.call("a", "has_code_archive", sha)


def test_a_piece_that_arrives_late_does_not_end_the_send(large, tmp_path):
    """The call for it was given up; the next send has asked what arrived before it did."""
    packages, sha = large
    node = NodePackages(tmp_path / "node")
    calls = Calls(node)
    first, arrived = packages.path(sha).read_bytes()[:PIECE_BYTES], node.arrived

    def arrived_before(name):
        reply = arrived(name)
        if not reply["bytes"]:
            node.put(name, 0, first, False)
            reply = {"bytes": 1, "sha256": hashlib.sha256(first[:1]).hexdigest()}
        return reply

    node.arrived = arrived_before
    packages.send(sha, "a", calls)
    assert node.has(sha) and calls.pieces == 3


def test_archives_keep_to_the_rate_of_copies_between_machines(large, start_node, recorded):
    packages, sha = large
    slept_s = []
    limit = RateLimit(PIECE_BYTES, now=lambda: sum(slept_s), sleep=slept_s.append)
    facts = from_plain(NodeFacts, recorded.RECORDED[0])
    packages.send(sha, "a", start_node(facts=replace(facts, host="a", address="10.0.0.2")), limit)
    assert slept_s == [1.0, 1.0]


def test_an_archive_for_the_servers_own_machine_does_not_wait(large, start_node, recorded):
    packages, sha = large
    facts = replace(from_plain(NodeFacts, recorded.RECORDED[0]), host="server", address="10.0.0.1")
    packages.send(sha, "a", start_node(facts=facts), RateLimit(PIECE_BYTES, sleep=pytest.fail))


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

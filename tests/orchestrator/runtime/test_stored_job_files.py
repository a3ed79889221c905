"""Files of jobs whose node is away and whose pool's storage is an object store, as the server finds and moves them.

Ray is recorded: a call is made in this process. So tools run here, too, because a child would have a memory of its own.
"""

import shutil
import threading
from dataclasses import replace
from types import SimpleNamespace

import fsspec
import pytest
from memory_store import memory_store
from patience import LIMIT_S
from recorded_agents import RecordedAgents

from cluster.errors import FleetError
from cluster.serialization import from_plain
from cluster.types import NodeFacts
from orchestrator.core.controller.attempts import PreviousAttempt
from orchestrator.core.controller.commands import Launch
from orchestrator.core.states import TERMINAL
from orchestrator.runtime.agents import actors
from orchestrator.runtime.files import job_files
from orchestrator.runtime.files.file_locations import FileLocator
from orchestrator.runtime.files.file_moves import FileMoves
from orchestrator.runtime.jobs import cleanup
from orchestrator.runtime.jobs.files_limit import FilesLimit
from orchestrator.store.events.retention import AttemptFolderRef
from workers.checkpoint.tools import run
from workers.node.node_facts import node_identity
from workers.node.node_files import NodeFiles
from workers.storage.job_file_mirror import JobFileMirror

URI = "memory://bucket/runs"


class Files(NodeFiles):
    """The files of a node. Its tools run in this process; `tool` may be replaced."""

    def __init__(self, identity):
        self.tool, self.ended = run, []
        super().__init__(identity)

    def _make_file_mirror(self, identity):
        storage, run_tool = self._storage, lambda *arguments: self.tool(*arguments)
        return JobFileMirror(storage, identity.node, URI, lambda: self.ended, run_tool)

    def wrote(self, epoch, text):
        """An attempt has ended here and left a file, which was uploaded."""
        (self._storage.make_folder(f"j/output-{epoch}") / "who").write_text(text)
        self.ended = [("j", epoch)]
        self._file_mirror.upload_due()

    def text(self, epoch):
        path = self._storage.root / f"j/output-{epoch}/who"
        return path.read_text() if path.exists() else None

    def remove_all_files(self, generation, attempts):
        raise AssertionError("only nodes that are away have folders in these tests")


class Nodes(RecordedAgents):
    """A node that is lost takes its disk with it."""

    def lose(self, *nodes):
        for node in nodes:
            shutil.rmtree(self.files[node]._storage.root)
        super().lose(*nodes)


@pytest.fixture
def fleet(monkeypatch, tmp_path, recorded):
    """Four nodes of pool p, whose storage is the store. Each has a disk of its own."""
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(actors, "get_result", lambda result, what, timeout_s: result)
    facts, nodes = from_plain(NodeFacts, recorded.RECORDED[0]), {}
    with memory_store(monkeypatch):
        for name in "abcd":
            identity = node_identity(name, "p", "cpu", tmp_path / "nodes" / name, tmp_path / "disks" / name)
            own = replace(facts, node=name, host=name, pool="p", storage_id=name, object_store=URI, neighbours=())
            nodes[name] = own, Files(replace(identity, object_store=URI))
        yield Nodes(nodes)


def ran(epoch, *nodes, is_over=True):
    return PreviousAttempt(epoch, "p", nodes, started=True, is_over=is_over)


def locate(fleet, *attempts):
    return FileLocator(fleet).find_or_download("j", attempts, lambda *progress: None)


def launch(fleet, epoch, nodes, *attempts):
    command = Launch("j", epoch, nodes, (), ({},), "p", "place", previous_attempts=attempts)
    return FileMoves(fleet).ensure_on_nodes(command, lambda activity: None)


@pytest.mark.parametrize("is_over", [True, False])
def test_the_next_attempt_starts_with_the_files_of_a_node_that_was_released(fleet, is_over):
    fleet.files["a"].wrote(1, "1")
    fleet.lose("a")
    assert launch(fleet, 2, ("c",), ran(1, "a", is_over=is_over)) == ""
    assert fleet.files["c"].text(2) == "1"
    (folder,) = locate(fleet, ran(2, "c")).folders
    assert (folder.node, folder.epoch) == ("c", 2)


def test_files_of_a_released_node_are_read_and_changed_on_another_one_which_is_asked_again(fleet):
    fleet.files["a"].wrote(1, "1")
    fleet.lose("a")
    (folder,) = locate(fleet, ran(1, "a")).folders
    assert (folder.node, folder.epoch, folder.missing) == ("b", 1, "") and fleet.files["b"].text(1) == "1"
    fleet.files["b"].tool = None
    assert locate(fleet, ran(1, "a")).folders == (folder,), "it is there already"


def test_each_folder_of_a_gang_goes_to_another_node_and_what_has_no_place_is_named(fleet):
    fleet.files["a"].wrote(1, "rank 0")
    fleet.files["b"].wrote(1, "rank 1")
    fleet.lose("a", "b")
    located = locate(fleet, ran(1, "a", "b"))
    assert [(folder.node, folder.node_rank) for folder in located.folders] == [("c", 0), ("d", 1)]
    assert [fleet.files[node].text(1) for node in "cd"] == ["rank 0", "rank 1"] and located.away == ()
    fleet.lose("d")
    located = locate(fleet, ran(1, "a", "b"))
    assert [folder.node for folder in located.folders] == ["c"] and located.away == ("b",)


def test_a_node_whose_disk_was_lost_gets_its_files_back(fleet):
    fleet.files["a"].wrote(1, "1")
    shutil.rmtree(fleet.files["a"]._storage.root / "j")
    assert [folder.node for folder in locate(fleet, ran(1, "a")).folders] == ["a"] and fleet.files["a"].text(1) == "1"


def test_an_older_attempt_s_files_in_the_store_do_not_count(fleet):
    fleet.files["a"].wrote(1, "1")
    fleet.lose("a")
    located = locate(fleet, ran(2, "b", is_over=False), ran(1, "a"))
    assert located.folders == () and fleet.files["b"].text(1) is None


def test_a_store_that_cannot_be_reached_is_an_error_and_no_start_without_files(fleet):
    fleet.files["a"].wrote(1, "1")
    fleet.lose("a")

    def broken(*arguments):
        raise FleetError("memory://bucket/runs cannot be listed: the network is down")

    for node in "bcd":
        fleet.files[node].tool = broken
    with pytest.raises(FleetError, match="the network is down"):
        launch(fleet, 2, ("c",), ran(1, "a"))
    with pytest.raises(FleetError, match="the network is down"):
        locate(fleet, ran(1, "a"))


def test_a_node_that_uploaded_nothing_is_away_and_the_remedy_says_what_is_left(fleet):
    fleet.lose("a")
    located = locate(fleet, ran(1, "a"))
    assert (located.folders, located.away) == ((), ("a",))
    error = FileLocator(fleet).away_error("j", located.away)
    assert "only files in its pool's object store are left" in str(error)


def test_a_request_waits_for_a_bounded_time_and_says_how_far_the_download_is(fleet, monkeypatch):
    """The download is held by the tool; the second request finds it complete."""
    fleet.files["a"].wrote(1, "12345")
    fleet.lose("a")
    go_on = threading.Event()

    def held(verb, arguments, progress=None):
        if verb != "fetch_files":
            return run(verb, arguments)
        progress(0, 5 << 20)
        assert go_on.wait(LIMIT_S)
        return run(verb, arguments, progress)

    for node in "bcd":
        fleet.files[node].tool = held
    monkeypatch.setattr(job_files, "previous_attempts", lambda attempts: attempts)
    record = SimpleNamespace(job=SimpleNamespace(id="j"), attempts=[ran(1, "a")], live_attempt=None)
    service = job_files.JobFileService(fleet, download_wait_s=0.0)
    with pytest.raises(FleetError, match=r"node b is still downloading the files of j .* \(0.0 of 5.0 MiB\); run"):
        service.page(record, "", "")
    go_on.set()
    page = job_files.JobFileService(fleet, download_wait_s=LIMIT_S).page(record, "", "")
    assert [entry["path"] for entry in page["entries"]] == ["who"]


def test_what_an_upload_left_out_is_said_by_a_listing_and_by_the_next_attempt(fleet):
    (fleet.files["a"]._storage.make_folder("j/output-1") / "out").symlink_to("/etc/passwd")
    fleet.files["a"].wrote(1, "1")
    fleet.lose("a")
    (folder,) = locate(fleet, ran(1, "a")).folders
    assert folder.missing.startswith("1 of its files were not uploaded, such as 'out'")
    assert launch(fleet, 2, ("b",), ran(1, "a")) == folder.missing


def stored(fleet):
    return [path for path in fsspec.filesystem("memory").store if "/.files/" in path]


def test_files_of_removed_jobs_are_removed_from_the_store_though_their_node_is_gone(fleet):
    fleet.files["a"].wrote(1, "1")
    fleet.lose("a")
    remove = cleanup.folder_remover(fleet)
    for _ in range(2):
        with pytest.raises(FleetError):
            remove([AttemptFolderRef("a", "j", 1)])
        for files in fleet.files.values():
            files._file_mirror.upload_due()
        assert stored(fleet) == []
        for files in fleet.files.values():
            files.tool = None  # removed once, and not again every ten minutes


def test_the_limit_of_files_removes_them_from_the_store_too(fleet):
    fleet.files["b"].wrote(1, "1")
    fleet.lose("a", "c", "d")
    job = SimpleNamespace(state=next(iter(TERMINAL)), epoch=1)
    jobs = SimpleNamespace(get=lambda name: SimpleNamespace(job=job, live_attempt=None, ended_s=1.0))
    FilesLimit(fleet, jobs, 0).remove()
    fleet.files["b"]._file_mirror.upload_due()
    assert stored(fleet) == [] and fleet.files["b"].text(1) is None


def test_an_error_of_a_download_names_the_node_and_the_job(fleet):
    fleet.files["a"].wrote(1, "1")
    fleet.lose("a")

    def tool(verb, *arguments):
        if verb == "fetch_files":
            raise FleetError("'who' cannot be written on b: No space left on device", "free disk space on that machine")
        return run(verb, *arguments)

    for files in fleet.files.values():
        files.tool = tool
    with pytest.raises(FleetError, match=r"node b cannot download the files of j: 'who' cannot be written on b: No"):
        locate(fleet, ran(1, "a"))

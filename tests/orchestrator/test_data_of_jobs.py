"""Data that a job reads: sent, fetched once, cached, seen read-only, and told where it is not what it should be."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
from patience import LIMIT_S

from cluster.errors import FleetError, SpecError, UserError
from cluster.host.content_hash import content_of
from cluster.input.folder_access import digest
from orchestrator.cli.jobs import job_arguments
from orchestrator.client import client as http
from orchestrator.core.controller.commands import Launch
from orchestrator.core.model import Data
from orchestrator.runtime.checkpoints.checkpoints import CheckpointService
from orchestrator.runtime.files.data_moves import DataMoves
from orchestrator.submission import submission
from workers.checkpoint import tools
from workers.checkpoint.transfer import stores

READ = "find -L . -type f | LC_ALL=C sort | xargs cat; ls -ld data | cut -c1"


@pytest.fixture
def client(live):
    with http.connect(start=False) as client:
        yield client


@pytest.fixture
def tokens(tmp_path) -> Path:
    folder = tmp_path / "tokens"
    (folder / "deep").mkdir(parents=True)
    (folder / "a").write_text("A\n")
    (folder / "deep/b").write_text("B\n")
    return folder


def spec(uri, mount="data/", command=READ, sha256="", pool="cpu", **more):
    data = {"uri": str(uri), "mount": mount} | ({"sha256": sha256} if sha256 else {})
    return {"command": command, "resources": {"pool": pool}, "data": [data], **more}


def ended(client, job, state="SUCCEEDED"):
    view = client.wait(submission.submit(client, job)["id"])
    assert view["state"] == state, view
    return view


def printed(client, job) -> list[str]:
    pages = client.jobs.follow(ended(client, job)["id"])
    return [line["text"] for page in pages for line in page["lines"]]


def cached(live, pool="cpu") -> list[str]:
    folder = live.home / "storage" / pool / ".data"
    return sorted(path.name for path in folder.glob("*") if len(path.name) == 64)


def test_a_folder_of_this_machine_is_sent_once_and_seen_read_only_by_jobs_of_two_pools(client, live, tokens):
    sha = content_of(tokens).sha256
    assert printed(client, spec(tokens)) == ["A", "B", "l"]
    told = []
    submission.submit(client, spec(tokens), progress=told.append)
    assert told == []  # the server has it
    assert printed(client, spec(tokens, sha256=sha, pool="xla")) == ["A", "B", "l"]
    assert cached(live) == cached(live, "xla") == [sha]
    assert live.specs[0]["data"] == [{"uri": str(tokens), "mount": "data/", "sha256": sha}]
    assert list((live.home / "storage/cpu/.uploads").glob("[!.]*")) == []


def test_a_folder_of_links_arrives_as_the_files_behind_them(client, live, tokens, tmp_path):
    cache = tmp_path / "snapshot"
    cache.mkdir()
    for name in ("a", "b"):
        (cache / name).symlink_to(next(path for path in tokens.rglob(name)))
    (tmp_path / "latest").symlink_to(cache)
    job = spec(tmp_path / "latest", command="cat data/a data/b; find data/ -type l | wc -l")
    assert printed(client, job) == ["A", "B", "0"]


def test_a_single_file_lies_in_the_mount_or_is_it(client, live, tokens):
    assert printed(client, spec(tokens / "a", command="cat data/a")) == ["A"]
    assert printed(client, spec(tokens / "a", mount="in/here.txt", command="cat in/here.txt")) == ["A"]
    assert len(cached(live)) == 1


def test_what_a_job_has_left_is_read_by_another_one(client, live):
    made = ended(client, {"command": "echo 7 > $POLYFLEET_OUTPUT_DIR/seven", "resources": {"pool": "cpu"}})["id"]
    for pool in ("cpu", "xla"):
        job = spec(f"cpu:{made}/output", command="cat data/seven", pool=pool)
        assert printed(client, job) == ["7"]
    assert printed(client, spec(f"cpu:{made}/output/seven", mount="s", command="cat s")) == ["7"]
    failed = ended(client, spec(f"cpu:{made}/output/eight"), "FAILED")
    assert failed["reason"].startswith(f"data.0.uri: no file is at cpu:{made}/output/eight")
    assert failed["failure"]["kind"] == "user" and len(failed["attempts"]) == 1


def test_a_hash_that_does_not_match_names_both_and_nothing_is_kept(client, live, tokens):
    sha, wrong = content_of(tokens / "a").sha256, "0" * 64
    with pytest.raises(SpecError) as raised:
        submission.submit(client, spec(tokens / "a", sha256=wrong))
    assert raised.value.field == "data.0.sha256" and raised.value.message.endswith(
        f"is {wrong}, but {tokens / 'a'} has the SHA-256 {sha}"
    )
    made = ended(client, {"command": "printf 'A\\n' > $POLYFLEET_OUTPUT_DIR/a", "resources": {"pool": "cpu"}})["id"]
    view = ended(client, spec(f"cpu:{made}/output/a", sha256=wrong), "FAILED")
    assert f"data.0.sha256: is {wrong}, and cpu:{made}/output/a has the SHA-256 {sha}" in view["reason"]
    assert cached(live) == [] and list((live.home / "storage/cpu/.uploads").glob("[!.]*")) == []
    ended(client, spec(f"cpu:{made}/output/a", command="true", sha256=sha))


def test_links_that_lead_out_of_what_a_job_has_left_are_refused(client, live):
    command = "echo 1 > $POLYFLEET_OUTPUT_DIR/a; ln -s /etc/passwd $POLYFLEET_OUTPUT_DIR/b"
    made = ended(client, {"command": command, "resources": {"pool": "cpu"}})["id"]
    view = ended(client, spec(f"cpu:{made}/output"), "FAILED")
    assert "'output-1/b' is a link, and data must not contain links" in view["reason"]
    assert cached(live) == []


def test_what_is_not_there_or_was_not_sent_is_refused_at_once(client, live, tokens, tmp_path):
    with pytest.raises(SpecError, match="there is no file or folder"):
        submission.submit(client, spec(tmp_path / "absent"))
    (tokens / "link").symlink_to("nowhere")
    with pytest.raises(SpecError, match="is a link to nowhere, which is not a file"):
        submission.submit(client, spec(tokens))
    for sha256 in ("", "0" * 64):
        with pytest.raises(SpecError, match="the server does not have its content"):
            client.jobs.submit(spec(tokens, sha256=sha256))
    assert live.specs == []


def test_a_mount_where_the_submitted_folder_has_something_is_refused(client, live, tokens, tmp_path):
    code = tmp_path / "code"
    (code / "data").mkdir(parents=True)
    (code / "data/x").write_text("")
    for mount in ("data", "data/x/deeper"):
        with pytest.raises(SpecError, match=f"'{mount}' overlaps 'data/x' of the submitted folder"):
            submission.submit(client, spec(tokens, mount=mount, working_dir=str(code)))
    (code / "link").symlink_to("data")
    with pytest.raises(SpecError, match="'link' overlaps 'link/' of the submitted folder"):
        submission.submit(client, spec(tokens, mount="link", working_dir=str(code)))


def test_data_is_shown_below_a_linked_folder(client, tokens, tmp_path):
    (tmp_path / "code/storage").mkdir(parents=True)
    (tmp_path / "code/data").symlink_to("storage")
    command = "test -L data && ls storage/tokens && ls data/tokens/* > $POLYFLEET_OUTPUT_DIR/shown"
    ended(client, spec(tokens, command=command, mount="data/tokens/", working_dir=str(tmp_path / "code")))


def test_what_was_sent_goes_from_the_server_once_no_open_job_names_it(client, live, tokens, talking, wait_for):
    sha = content_of(tokens).sha256
    job = submission.submit(client, talking.spec | {"data": spec(tokens)["data"], "resources": {"pool": "cpu"}})["id"]
    lock = live.home / "data" / sha / "lock"
    wait_for(lambda: client.jobs.show(job)["state"] == "RUNNING")
    os.utime(lock, (1, 1))
    live.service._housekeeping._remove_unused_data()
    assert client.data.check(sha)
    talking.end()
    assert client.wait(job)["state"] == "SUCCEEDED"
    os.utime(lock, (1, 1))
    live.service._housekeeping._remove_unused_data()
    assert not client.data.check(sha)


def test_what_was_sent_is_not_what_it_is_called(client, live):
    client.files.begin_upload("an-upload", "")
    client.files.send_piece("an-upload", "", "a", digest(b"A"), b"A", size_bytes=1, modified_s=1.0)
    with pytest.raises(Exception, match=r"the data has the SHA-256 .*, not 0000"):
        client.data.store("0" * 64, "an-upload", single="a")
    assert not client.data.check("0" * 64) and list((live.home / "data/uploads").iterdir()) == []
    with pytest.raises(Exception, match="not inside"):
        client.data.store("0" * 64, "an-upload", single="../../token")


class HereTools(CheckpointService):
    """Tools run in this process, whose store in memory no child could see. `before` is called before each."""

    def __init__(self, live, before=lambda verb: None):
        super().__init__(live.service.agents)
        self._home, self._before, self.ran = live.home, before, []

    def run_tool(self, node, verb, arguments, progress):
        self.ran.append(verb)
        self._before(verb)
        given = {"source": arguments["source"]["uri"].replace("s3://", "memory://")}
        if verb == "fetch":
            target = self._home / "storage" / arguments["target"]["pool"] / arguments["target"]["path"]
            target.mkdir(parents=True, exist_ok=True)
            given |= {"target": str(target), "version": arguments["version"]}
        return tools.run(verb, given, progress if verb == "fetch" else None)


@pytest.fixture
def bucket(monkeypatch):
    monkeypatch.setattr(stores, "IN_MEMORY", ("memory",))
    monkeypatch.setattr(tools, "is_uri", lambda place: False)
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pipe({"/bucket/data/a": b"A", "/bucket/data/b": bytes(1 << 20)})
    yield files
    files.store.clear()


def asked(job="j", sha256="", *nodes):
    return Launch(
        job, 1, nodes or ("cpu-0",), (), ({},), "cpu", "place", data=(Data("s3://bucket/data", "d/", sha256),)
    )


def test_two_jobs_that_want_the_same_at_once_fetch_it_once(live, bucket):
    waits, told = threading.Event(), []

    def before(verb):
        assert verb != "fetch" or waits.wait(LIMIT_S)

    def tell(what):
        told.append(what)
        if "another job fetches" in what:
            waits.set()

    tools_here = HereTools(live, before)
    moves = DataMoves(live.service.agents, tools_here, live.service.data)
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda job: moves.ensure_on_nodes(asked(job), tell), ["one", "two"]))
    assert both[0] == both[1] == ((cached(live)[0], "d", "data"),)
    assert tools_here.ran.count("fetch") == 1
    assert "fetches 1.0 MiB of data from s3://bucket/data (100 %)" in told
    assert moves.ensure_on_nodes(asked(sha256=cached(live)[0]), told.append) == both[0]
    assert tools_here.ran.count("look") == 2  # where the hash is known nobody asks the store


def test_a_fetch_that_is_cut_leaves_nothing_in_the_cache_and_goes_on_afterwards(live, bucket, monkeypatch):
    moves = DataMoves(live.service.agents, HereTools(live), live.service.data)
    agent = live.fleet.agent("cpu-0")

    def dies(*_):
        raise FleetError("the agent was killed")

    with monkeypatch.context() as patch:
        patch.setattr(agent, "keep_data", dies)
        with pytest.raises(FleetError, match="was killed"):
            moves.ensure_on_nodes(asked(), lambda what: None)
    assert cached(live) == []
    moves.ensure_on_nodes(asked(), lambda what: None)
    assert len(cached(live)) == 1
    bucket.pipe({"/bucket/data/c": b"C"})
    moves.ensure_on_nodes(asked(), lambda what: None)
    assert len(cached(live)) == 2


def test_a_cache_that_is_too_small_is_told_and_the_job_fails(live, bucket, monkeypatch):
    monkeypatch.setenv("POLYFLEET_DATA_CACHE_BYTES", "1000")
    moves = DataMoves(live.service.agents, HereTools(live), live.service.data)
    with pytest.raises(SpecError, match=r"data.0: the data has 1,048,577 bytes; the cache is limited to 1,000"):
        moves.ensure_on_nodes(asked(), lambda what: None)
    monkeypatch.setenv("POLYFLEET_DATA_CACHE_BYTES", "many")
    with pytest.raises(SpecError, match="write a number of bytes"):
        moves.ensure_on_nodes(asked(), lambda what: None)


def test_what_is_not_in_the_store_ends_the_job_and_trouble_does_not(live, bucket):
    moves = DataMoves(live.service.agents, HereTools(live), live.service.data)
    bucket.store.clear()
    with pytest.raises(SpecError, match=r"data\.0\.uri: nothing is at"):
        moves.ensure_on_nodes(asked(), lambda what: None)


def test_the_option_names_uri_and_mount_and_adds_to_a_job_files_own(tmp_path):
    def data(*given, words=(), command=("true",)):
        asked = job_arguments.SubmitArguments(list(words), None if words else list(command), data=list(given))
        return [(one.uri, one.mount) for one in job_arguments.build_specs(asked)[0].data]

    assert data("s3://bucket/x:data/", "./a:b:c") == [("s3://bucket/x", "data/"), ("./a:b", "c")]
    file = tmp_path / "job.yaml"
    file.write_text("command: 'true'\ndata: [{uri: own, mount: own/}]\n")
    assert data("cpu:j/output:in", words=[str(file)]) == [(str(tmp_path / "own"), "own/"), ("cpu:j/output", "in")]
    for wrong in ("./x", "s3://bucket/x", ":data", "./x:"):
        with pytest.raises(UserError, match=r"is not of the form URI:MOUNT"):
            data(wrong)

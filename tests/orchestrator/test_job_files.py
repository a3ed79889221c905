"""Files of jobs through the real service: what ranks wrote is listed, fetched, added to, and follows its job."""

import json
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from cluster.errors import Conflict, FleetError, NotFound, UserError
from cluster.input.folder_access import PIECE_BYTES
from orchestrator.client import client as http
from orchestrator.client import file_download, file_upload
from orchestrator.client.file_download import read_piece
from orchestrator.client.file_transfer import list_all_files

WRITE = """
import os, pathlib
out = pathlib.Path(os.environ["POLYFLEET_OUTPUT_DIR"])
(out / "sub").mkdir()
(out / "sub" / "a.txt").write_text("hello")
(out / "empty").touch()
(out / "run.sh").write_text("#!/bin/sh"); (out / "run.sh").chmod(0o755)
(out / "latest").symlink_to("sub/a.txt")
(out / "outside").symlink_to("/etc/hostname")
(out / "large").write_bytes(bytes(range(256)) * 40_000 * 2)
"""
TREE = {"sub/a.txt", "empty", "run.sh", "large"}


@pytest.fixture
def client(live):
    with http.connect(start=False) as client:
        yield client


def run(code, pool="cpu", **more):
    return {
        "task": "run",
        "name": "writes",
        "command": [sys.executable, "-c", code],
        "resources": {"pool": pool},
        **more,
    }


@pytest.fixture
def wrote(live):
    return live.ran(run(WRITE))["id"]


def test_what_a_job_wrote_is_listed_with_sizes_and_fetched_as_it_was(client, wrote, tmp_path):
    told = list_all_files(client, wrote)
    assert {e["path"]: e["bytes"] for e in told["entries"] if e["type"] == "file"}.keys() == TREE
    assert next(e for e in told["entries"] if e["path"] == "outside")["refused"]
    got = file_download.get(client, wrote, "", str(tmp_path / "here"))
    here = tmp_path / "here"
    assert set(got.files) == TREE and (here / "sub/a.txt").read_text() == "hello"
    assert (here / "large").read_bytes() == bytes(range(256)) * 80_000 and os.access(here / "run.sh", os.X_OK)
    assert (here / "latest").readlink() == Path("sub/a.txt") and not os.path.lexists(here / "outside")
    assert "outside is left out" in " ".join(got.notes)
    again = file_download.get(client, wrote, "", str(here))
    assert again.transferred_bytes == 0 and got.transferred_bytes == got.bytes == sum(
        f.stat().st_size for f in here.rglob("*") if f.is_file() and not f.is_symlink()
    )


def test_a_single_file_goes_to_the_name_or_into_the_folder_that_was_given(client, wrote, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file_download.get(client, wrote, "sub/a.txt")
    file_download.get(client, wrote, "sub/a.txt", "b.txt")
    (tmp_path / "folder").mkdir()
    file_download.get(client, wrote, "sub/a.txt", "folder")
    file_download.get(client, wrote, "sub", "of-sub")
    assert all(Path(name).read_text() == "hello" for name in ("a.txt", "b.txt", "folder/a.txt", "of-sub/a.txt"))


def test_a_local_file_that_differs_is_left_alone_without_force(client, wrote, tmp_path):
    here = tmp_path / "a.txt"
    here.write_text("mine")
    with pytest.raises(Conflict, match="already exists and differs; nothing was written"):
        file_download.get(client, wrote, "sub/a.txt", str(here))
    assert here.read_text() == "mine"
    file_download.get(client, wrote, "sub/a.txt", str(here), force=True)
    assert here.read_text() == "hello" and list(tmp_path.glob(".*")) == []


def test_what_was_cut_off_goes_on_where_it_was(client, wrote, tmp_path):
    class Cut(Exception):
        pass

    def cut(done, total):
        raise Cut

    with pytest.raises(Cut):
        file_download.get(client, wrote, "large", str(tmp_path) + "/", progress=cut)
    [part] = tmp_path.glob(".large.*.part")
    assert part.stat().st_size >= PIECE_BYTES and not (tmp_path / "large").exists()
    seen = []
    file_download.get(
        client, wrote, "large", str(tmp_path) + "/", progress=lambda done, total: seen.append((done, total))
    )
    assert (tmp_path / "large").stat().st_size == 20_480_000 == seen[-1][1] and not part.exists()


def test_files_are_put_and_none_that_differs_is_written_over_without_force(client, live, wrote, tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x.bin").write_bytes(os.urandom(PIECE_BYTES + 5))
    (tmp_path / "a.txt").write_text("other")
    put = file_upload.put(client, str(tmp_path / "d"), wrote, "data")
    assert put.files == ["data/x.bin"]
    assert file_upload.put(client, str(tmp_path / "d"), wrote, "data").transferred_bytes == 0
    assert file_upload.put(client, str(tmp_path / "a.txt"), wrote).files == ["a.txt"]
    with pytest.raises(Conflict, match=r"sub/a\.txt already exists and differs"):
        file_upload.put(client, str(tmp_path / "a.txt"), wrote, "sub")
    file_upload.put(client, str(tmp_path / "a.txt"), wrote, "sub", force=True)
    file_download.get(client, wrote, "", str(tmp_path / "back"))
    assert (tmp_path / "back/sub/a.txt").read_text() == "other"
    assert (tmp_path / "back/data/x.bin").read_bytes() == (tmp_path / "d/x.bin").read_bytes()
    assert list((live.home / "storage/cpu/.uploads").glob("[!.]*")) == []


def test_a_file_of_a_running_job_is_not_written_over_and_others_are_added(client, live, talking, wait_for, tmp_path):
    pipe = talking.spec["command"][1]
    job = client.jobs.submit(
        run(f"import os; open(os.environ['POLYFLEET_OUTPUT_DIR'] + '/log', 'w').write('1'); open({pipe!r}).read()")
    )["id"]
    wait_for(lambda: client.jobs.show(job)["state"] == "RUNNING" and list_all_files(client, job)["entries"])
    (tmp_path / "log").write_text("2")
    for force in (False, True):
        with pytest.raises(Conflict, match="'log' is a file of a running job"):
            file_upload.put(client, str(tmp_path / "log"), job, force=force)
    file_upload.put(client, str(tmp_path / "log"), job, "new/log")
    assert {e["path"] for e in list_all_files(client, job)["entries"]} == {"log", "new", "new/log"}
    talking.end()
    assert client.wait(job)["state"] == "SUCCEEDED"


def test_a_job_that_moves_to_another_pool_finds_its_files_there(client, live, talking, wait_for, tmp_path):
    pipe = talking.spec["command"][1]
    code = f"""
import os, pathlib
out = pathlib.Path(os.environ["POLYFLEET_OUTPUT_DIR"])
seen = (out / "seen").read_text() if (out / "seen").exists() else ""
(out / "seen").write_text(seen + os.environ["POLYFLEET_EPOCH"])
if not seen:
    (out / "latest").symlink_to("seen")
    open({pipe!r}).read()
"""
    job = client.jobs.submit(run(code, recovery={"grace": "1s"}))["id"]
    wait_for(lambda: any(e["path"] == "latest" for e in list_all_files(client, job)["entries"]))
    client.jobs.migrate(job, "ipex")
    assert client.wait(job)["state"] == "SUCCEEDED"
    told = list_all_files(client, job)
    assert told["folders"] == [{"prefix": "", "attempt": 2, "node": "ipex-0", "pool": "ipex"}]
    file_download.get(client, job, "", str(tmp_path / "back"))
    assert (tmp_path / "back/latest").read_text() == "12"
    assert not (live.home / "storage/cpu" / job).exists()


def test_a_job_that_wrote_nothing_leaves_nothing(client, live):
    job = live.ran(run("import os; assert os.path.isdir(os.environ['POLYFLEET_OUTPUT_DIR'])"))["id"]
    assert not (live.home / "storage/cpu" / job).exists()
    assert list_all_files(client, job)["entries"] == []
    with pytest.raises(NotFound, match="has no files"):
        list_all_files(client, job, "a")


def test_files_on_a_node_that_is_away_say_which_and_since_when(client, live, wrote):
    live.fleet.tell(live.service, "cpu-0", host="elsewhere")
    for node in [name for name, _ in live.service.agents.items()]:
        live.fleet.lose(live.service, node)
    with pytest.raises(FleetError, match=rf"the files of {wrote} are on node cpu-0, which has been away for .* s:"):
        list_all_files(client, wrote)


def test_paths_that_lead_out_of_the_folder_are_refused(client, wrote):
    for path in ("../x", "/etc/passwd", "sub/../../x"):
        with pytest.raises(UserError, match="is not inside the job's folder"):
            client.files.list(wrote, path=path)
    told = list_all_files(client, wrote)["folders"][0]
    for path in ("outside", "latest"):
        with pytest.raises(UserError, match="is a link"):
            read_piece(client, wrote, told, path, 0)
    with pytest.raises((NotFound, UserError)):
        read_piece(client, wrote, told | {"attempt": 7}, "large", 0)


def test_the_command_lists_gets_and_puts(here, live, wrote, tmp_path):
    told = json.loads(here("files", "ls", wrote, "-o", "json").stdout)
    assert {entry["path"] for entry in told["entries"]} >= TREE
    assert "20.0 MiB" not in here("files", "ls", f"{wrote}:sub").stdout
    assert here("files", "get", f"{wrote}:sub/a.txt", str(tmp_path / "x")).returncode == 0
    (tmp_path / "x").write_text("changed")
    refused = here("files", "get", f"{wrote}:sub/a.txt", str(tmp_path / "x"))
    assert refused.returncode == 2 and "--force" in refused.stderr
    assert here("files", "put", str(tmp_path / "x"), f"{wrote}:new/").returncode == 0
    assert "new/x" in here("files", "ls", wrote).stdout


def test_a_file_that_grows_while_it_is_fetched_is_fetched_and_that_is_said(client, live, wrote, tmp_path, monkeypatch):
    there, sizes = live.home / "storage/cpu" / wrote / "output-1/large", []

    def growing(*words):
        piece = read_piece(*words)
        with there.open("ab") as file:
            file.write(b"more")
        sizes.append(piece.size_bytes)
        return piece

    monkeypatch.setattr(file_download, "read_piece", growing)
    got = file_download.get(client, wrote, "large", str(tmp_path / "large"))
    assert "large changed while it was read" in got.notes[0]
    assert (tmp_path / "large").stat().st_size in sizes and list(tmp_path.glob(".*")) == []


def test_two_that_fetch_the_same_file_at_a_time_leave_it_whole(live, wrote, tmp_path):
    def fetch():
        with http.connect(start=False) as client, suppress(Conflict, FleetError):
            file_download.get(client, wrote, "large", str(tmp_path / "large"), force=True)

    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "large").read_bytes() == bytes(range(256)) * 80_000


def test_an_attempt_that_was_killed_leaves_its_files_to_the_next_one(client, live, talking, wait_for):
    pipe = talking.spec["command"][1]
    code = f"""
import os, pathlib
seen = pathlib.Path(os.environ["POLYFLEET_OUTPUT_DIR"]) / "seen"
before = seen.read_text() if seen.exists() else ""
seen.write_text(before + os.environ["POLYFLEET_EPOCH"])
before or open({pipe!r}).read()
"""
    job = client.jobs.submit(run(code))["id"]
    wait_for(lambda: [e["bytes"] for e in list_all_files(client, job)["entries"]] == [1])
    wait_for(lambda: client.jobs.show(job)["state"] == "RUNNING")  # its supervisor has noted that it started
    record = live.home / f"nodes/cpu-0/attempts/{job}.1.0/supervisor.json"
    psutil.Process(json.loads(record.read_text())["pid"]).kill()
    assert client.wait(job)["state"] == "SUCCEEDED"
    assert (live.home / "storage/cpu" / job / "output-2/seen").read_text() == "12"
    assert not (live.home / "storage/cpu" / job / "output-1").exists()

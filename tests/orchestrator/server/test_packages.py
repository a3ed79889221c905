"""A package is stored under its own hash or not at all."""

import hashlib
import io
import os
import zipfile

import pytest
from patience import LIMIT_S

from cluster.errors import NotFound
from cluster.host import last_used
from orchestrator.client import client as http

ZIP = {"Content-Type": "application/zip"}


def test_a_package_is_sent_once_and_known_afterwards(live):
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as made:
        made.writestr("data", os.urandom(3_000_000))
    data = written.getvalue()
    sha = hashlib.sha256(data).hexdigest()
    with live.http as client:
        assert client.head(f"/v1/code-archives/{sha}").status_code == 404
        assert client.put(f"/v1/code-archives/{sha}", content=data, headers=ZIP).json() == {"code_archive": sha}
        assert client.head(f"/v1/code-archives/{sha}").status_code == 200
    assert live.service.code_archives.path(sha).read_bytes() == data
    assert sorted(path.suffix for path in (live.home / "packages").iterdir()) == [".names", ".zip"]


def test_a_package_that_is_not_what_its_name_says_is_refused(live):
    with live.http as client:
        answer = client.put(f"/v1/code-archives/{'0' * 64}", content=b"other", headers=ZIP)
    assert (answer.status_code, answer.json()["error"]["type"]) == (422, "UserError")
    assert list((live.home / "packages").iterdir()) == []


@pytest.mark.parametrize("sha", ["0" * 63, "0" * 65, "G" * 64, "A" * 64, "%2e%2e"])
def test_what_is_no_hash_names_no_package(live, sha):
    with live.http as client:
        assert client.head(f"/v1/code-archives/{sha}").status_code == 422
        assert client.put(f"/v1/code-archives/{sha}", content=b"", headers=ZIP).status_code == 422


def test_json_is_no_package(live):
    with live.http as client:
        assert client.put(f"/v1/code-archives/{'0' * 64}", json={}).status_code == 415


def test_a_half_sent_package_leaves_nothing(live, wait_for):
    import socket

    folder = live.home / "packages"
    with socket.create_connection(("127.0.0.1", live.port), timeout=LIMIT_S) as raw:
        head = (
            f"PUT /v1/code-archives/{'0' * 64} HTTP/1.1\r\nHost: 127.0.0.1:{live.port}\r\n"
            f"Authorization: Bearer {live.token}\r\n"
            "Content-Type: application/zip\r\nContent-Length: 5000000\r\n\r\n"
        )
        raw.sendall(head.encode() + bytes(2_000_000))
        wait_for(lambda: folder.exists() and list(folder.iterdir()))
    wait_for(lambda: not list(folder.iterdir()))


def archive(name):
    """(sha, bytes) of a folder with one file."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as made:
        made.writestr(name, f"print({name!r})")
    return hashlib.sha256(written.getvalue()).hexdigest(), written.getvalue()


def test_an_archive_that_lost_its_end_is_sent_again_and_repaired(live):
    sha, data = archive("a.py")
    with live.http as client:
        client.put(f"/v1/code-archives/{sha}", content=data, headers=ZIP).raise_for_status()
        os.truncate(live.service.code_archives.path(sha), len(data) // 2)
        assert client.head(f"/v1/code-archives/{sha}").status_code == 404
        client.put(f"/v1/code-archives/{sha}", content=data, headers=ZIP).raise_for_status()
        assert client.head(f"/v1/code-archives/{sha}").status_code == 200
    assert live.service.code_archives.path(sha).read_bytes() == data


def test_an_archive_is_on_disk_before_it_is_acknowledged(live, monkeypatch):
    sha, data = archive("a.py")
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(os.fstat(descriptor).st_ino), fsync(descriptor)))
    with live.http as client:
        client.put(f"/v1/code-archives/{sha}", content=data, headers=ZIP).raise_for_status()
    kept = live.service.code_archives.path(sha)
    assert synced.index(kept.stat().st_ino) < synced.index(kept.parent.stat().st_ino)


def test_an_archive_goes_with_the_last_job_that_names_it_on_server_and_node(live, monkeypatch, wait_for):
    service, (first, data), (second, more) = live.service, archive("a.py"), archive("b.py")
    node = live.fleet.agent("cpu-0")._code_archives

    def ran(sha, data, name):
        with live.http as client:
            client.put(f"/v1/code-archives/{sha}", content=data, headers=ZIP).raise_for_status()
            spec = {"task": "run", "command": ["python", name], "name": name[0], "resources": {"pool": "cpu"}}
            job = client.post("/v1/jobs", json={"spec": spec, "code_archive": sha}).json()["id"]
        with http.connect(live.home, start=False) as client:
            return client.wait(job)

    removed, _ = ran(first, data, "a.py"), ran(second, more, "b.py")
    assert node.has(first) and node.has(second)
    service._housekeeping._remove_unused_data()
    assert service.code_archives.is_stored(first) and node.has(
        first
    )  # used within the last hour, though its job may be gone
    monkeypatch.setattr(last_used, "IDLE_S", 0.0)
    service._housekeeping._remove_unused_data()
    assert service.code_archives.is_stored(first) and node.has(first)
    ended_s = service.jobs_table.get(removed["id"]).ended_s
    remove = service.store.retention.remove_jobs
    wait_for(lambda: remove(ended_s + 1e-6, service.store.last_seq) == 1)  # once it has given its devices back
    service._housekeeping._remove_unused_data()
    assert (service.code_archives.is_stored(first), service.code_archives.is_stored(second)) == (False, True)
    assert (node.has(first), node.has(second)) == (False, True)
    with pytest.raises(NotFound):
        service.code_archives.contents(first)

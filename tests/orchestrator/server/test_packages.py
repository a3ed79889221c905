"""A package is stored under its own hash or not at all."""

import hashlib
import io
import os
import zipfile

import pytest

ZIP = {"Content-Type": "application/zip"}


def test_a_package_is_sent_once_and_known_afterwards(live):
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as made:
        made.writestr("data", os.urandom(3_000_000))
    data = written.getvalue()
    sha = hashlib.sha256(data).hexdigest()
    with live.http as client:
        assert client.head(f"/v1/packages/{sha}").status_code == 404
        assert client.put(f"/v1/packages/{sha}", content=data, headers=ZIP).json() == {"package": sha}
        assert client.head(f"/v1/packages/{sha}").status_code == 200
    assert live.service.packages.path(sha).read_bytes() == data
    assert sorted(path.suffix for path in (live.home / "packages").iterdir()) == [".names", ".zip"]


def test_a_package_that_is_not_what_its_name_says_is_refused(live):
    with live.http as client:
        answer = client.put(f"/v1/packages/{'0' * 64}", content=b"other", headers=ZIP)
    assert (answer.status_code, answer.json()["error"]["type"]) == (422, "UserError")
    assert list((live.home / "packages").iterdir()) == []


@pytest.mark.parametrize("sha", ["0" * 63, "0" * 65, "G" * 64, "A" * 64, "%2e%2e"])
def test_what_is_no_hash_names_no_package(live, sha):
    with live.http as client:
        assert client.head(f"/v1/packages/{sha}").status_code == 422
        assert client.put(f"/v1/packages/{sha}", content=b"", headers=ZIP).status_code == 422


def test_json_is_no_package(live):
    with live.http as client:
        assert client.put(f"/v1/packages/{'0' * 64}", json={}).status_code == 415


def test_a_half_sent_package_leaves_nothing(live, wait_for):
    import socket

    folder = live.home / "packages"
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as raw:
        head = (
            f"PUT /v1/packages/{'0' * 64} HTTP/1.1\r\nHost: 127.0.0.1:{live.port}\r\n"
            f"Authorization: Bearer {live.token}\r\n"
            "Content-Type: application/zip\r\nContent-Length: 5000000\r\n\r\n"
        )
        raw.sendall(head.encode() + bytes(2_000_000))
        wait_for(lambda: folder.exists() and list(folder.iterdir()))
    wait_for(lambda: not list(folder.iterdir()))

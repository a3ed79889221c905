"""A store that speaks S3 over HTTP. Needs `s3fs` and `moto[server]` in this environment, which the lock leaves out."""

import os
import re
import subprocess
import sys

import pytest

from workers.checkpoint.transfer.copier import copy, verify_location

pytest.importorskip("s3fs", reason="s3fs is not installed")
pytest.importorskip("moto.server", reason="moto[server] is not installed")


@pytest.fixture
def bucket(monkeypatch):
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", "0"], stderr=subprocess.PIPE, text=True, env=os.environ.copy()
    )
    try:
        port = next(found[1] for line in server.stderr if (found := re.search(r"http://127\.0\.0\.1:(\d+)", line)))
        for name, value in {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "DEFAULT_REGION": "us-east-1"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        import s3fs

        s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
        yield "s3://bucket/runs"
    finally:
        server.kill()
        server.wait()


def test_there_and_back_over_http(bucket, tmp_path, checkpoint_of_40_mib):
    source = checkpoint_of_40_mib
    assert copy(source, bucket)["transferred_bytes"] > 40 << 20
    assert copy(source, bucket)["already_there"]
    assert verify_location(bucket)["ok"]
    back = copy(bucket, tmp_path / "back")
    assert back["transferred_bytes"] == back["bytes"]
    for path in source.iterdir():
        assert path.read_bytes() == (tmp_path / "back" / source.name / path.name).read_bytes()

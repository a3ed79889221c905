"""Fixtures of the tests of workers."""

import os
import re
import subprocess
import sys

import pytest


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    """The URI of a prefix in a store that speaks S3 over HTTP."""
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path / "home"))
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
        server.stderr.close()

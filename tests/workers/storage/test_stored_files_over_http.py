"""Files of jobs in S3 over HTTP. Tools run in child processes, as nodes run them."""

import json
import subprocess
import sys
import time

from patience import LIMIT_S

from workers.checkpoint.tools import CODE
from workers.storage.job_file_mirror import JobFileMirror
from workers.storage.pool_storage import PoolStorage


def mirror(tmp_path, name, uri, *ended):
    return JobFileMirror(PoolStorage(tmp_path / name), name, uri, lambda: ended)


def content(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_files_are_uploaded_and_downloaded_by_another_node_and_removed(bucket, tmp_path, s3):
    a, b = mirror(tmp_path, "a", bucket, ("j", 1)), mirror(tmp_path, "b", bucket)
    folder = a._storage.make_folder("j/output-1")
    (folder / "sub").mkdir()
    (folder / "sub/large").write_bytes(bytes(range(256)) * 40_000)
    (folder / "empty").touch()
    a.upload_due()
    assert a.findings() == () and a.pending_uploads == 0
    assert b.restore("j", "a", 1, LIMIT_S)["epoch"] == 1
    assert content(tmp_path / "b/j/output-1") == content(folder)
    b.remove("j", 1)
    b.upload_due()
    assert s3.files().find(bucket.removeprefix("s3://")) == [] and b.findings() == ()


def test_an_upload_that_was_killed_is_not_visible_and_the_next_one_sends_what_is_missing(
    bucket, tmp_path, s3, monkeypatch
):
    a, b = mirror(tmp_path, "a", bucket, ("j", 1)), mirror(tmp_path, "b", bucket)
    folder = a._storage.make_folder("j/output-1")
    for number in range(60):
        (folder / str(number)).write_bytes(bytes([number]) * 200_000)
    prefix = f"{bucket.removeprefix('s3://')}/.files/j/output-1/a"
    place = {"uri": a._uri("j"), "epoch": 1, "node": "a", "root": str(tmp_path / "a"), "base": "j/output-1"}
    monkeypatch.setenv("POLYFLEET_COPY_RATE", "1MB")
    monkeypatch.setenv("PYTHONPATH", CODE)
    child = subprocess.Popen([sys.executable, "-P", "-m", "workers.checkpoint"], stdin=subprocess.PIPE)
    child.stdin.write(json.dumps({"verb": "put_files", "arguments": place}).encode() + b"\n")
    child.stdin.flush()
    deadline_s = time.monotonic() + LIMIT_S
    while len(s3.files().find(prefix)) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.1)
    child.kill()
    child.wait()
    child.stdin.close()
    before = {path: info["LastModified"] for path, info in s3.files().find(prefix, detail=True).items()}
    assert 3 <= len(before) < 60 and b.restore("j", "a", 1, LIMIT_S)["epoch"] == 0
    monkeypatch.delenv("POLYFLEET_COPY_RATE")
    a.upload_due()
    after = {path: info["LastModified"] for path, info in s3.files().find(prefix, detail=True).items()}
    assert len(after) == 61 and before.items() <= after.items(), "they were not sent again"
    assert mirror(tmp_path, "c", bucket).restore("j", "a", 1, LIMIT_S)["epoch"] == 1
    assert content(tmp_path / "c/j/output-1") == content(folder)


def test_a_bucket_that_does_not_exist_is_a_finding_and_counts_as_pending(bucket, tmp_path):
    a = mirror(tmp_path, "a", "s3://absent/runs", ("j", 1))
    (a._storage.make_folder("j/output-1") / "x").write_text("1")
    a.upload_due()
    (finding,) = a.findings()
    assert "files of jobs are not uploaded to s3://absent/runs" in finding.message and a.pending_uploads == 1

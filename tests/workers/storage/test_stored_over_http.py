"""A pool's storage in S3 over HTTP. The first tests run tools in child processes, as nodes do."""

import pytest

from workers.checkpoint.tools import run
from workers.storage.checkpoint_mirror import CheckpointMirror
from workers.storage.pool_storage import PoolStorage

save = pytest.importorskip("workers.checkpoint").save
torch = pytest.importorskip("torch")


def test_a_node_uploads_and_another_node_lists_verifies_and_stages(bucket, tmp_path):
    a, b = (CheckpointMirror(PoolStorage(tmp_path / name), "p", bucket, {"j": 1}.get) for name in "ab")
    path = save(a._storage.make_folder("j"), 1, {"t": {"w": torch.ones(9_000_000)}}).path
    a.upload_due()
    assert a.findings() == ()
    (row,) = b.list("")
    assert row == a.describe(f"j/{path.name}") | {"problem": ""} and b.resolve("j")["path"] == f"j/{path.name}"
    assert b.verify(row["path"])["ok"]
    staged = b._run("stage", {"source": f"{bucket}/{row['path']}", "target": str(b._storage.make_folder("j"))})
    assert staged["transferred_bytes"] == row["bytes"]
    names = [file.name for file in path.iterdir() if not file.name.startswith(".")]
    assert all((path / name).read_bytes() == (tmp_path / "b/j" / path.name / name).read_bytes() for name in names)


def test_a_bucket_that_does_not_exist_is_a_finding(bucket, tmp_path):
    a = CheckpointMirror(PoolStorage(tmp_path), "p", "s3://absent/runs")
    save(a._storage.make_folder("j"), 1, {"t": {"w": torch.ones(9)}})
    a.upload_due()
    (finding,) = a.findings()
    assert "checkpoints are not uploaded to s3://absent/runs" in finding.message


def test_what_is_pinned_stays_in_the_bucket_and_the_rest_is_pruned_to_the_last_object(bucket, tmp_path, s3):
    a = CheckpointMirror(PoolStorage(tmp_path / "a"), "p", bucket, run=run)
    names = [save(a._storage.make_folder("j"), step, {"t": {"w": torch.ones(9)}}).path.name for step in (1, 2, 3)]
    a.upload_due()
    a._run("pin_stored", {"path": f"{bucket}/j/{names[0]}"})
    assert [row["pinned"] for row in a.list("j")] == [False, False, True]
    result = a._run("prune_stored", {"root": f"{bucket}/j", "keep": 1})
    assert result["deleted"] == [names[1]]
    left = {path.split("/")[3] for path in s3.files().find(bucket.removeprefix("s3://"))}
    assert left == {names[0], names[2]}


def test_uploads_and_downloads_keep_to_the_rate_of_this_machine(bucket, tmp_path, monkeypatch):
    """How long they take is not asserted: the file in which each piece is booked shows that they were paced."""
    booked = tmp_path / "home" / "upload-locks" / "rate"
    a = CheckpointMirror(PoolStorage(tmp_path / "a"), "p", bucket, run=run)
    path = save(a._storage.make_folder("j"), 1, {"t": {"w": torch.ones(9)}}).path
    a.upload_due()
    assert not booked.exists(), "no limit is set"
    monkeypatch.setenv("POLYFLEET_COPY_RATE", "50MB")
    another = CheckpointMirror(PoolStorage(tmp_path / "a"), "p", f"{bucket}-2", run=run)
    another.upload_due()
    uploaded = booked.read_text()
    another._run("stage", {"source": f"{bucket}-2/j/{path.name}", "target": str(tmp_path / "b")})
    assert float(uploaded) < float(booked.read_text())
    monkeypatch.setenv("POLYFLEET_COPY_RATE", "fast")
    save(a._storage.make_folder("j"), 2, {"t": {"w": torch.ones(9)}})
    a.upload_due()
    assert "POLYFLEET_COPY_RATE: 'fast' is not a size" in a.findings()[0].message

"""A pool's storage in S3 over HTTP, with tools in child processes. Needs `s3fs` and `moto[server]`, as test_s3 does."""

import pytest

from workers.storage.checkpoint_mirror import CheckpointMirror
from workers.storage.pool_storage import PoolStorage

pytest.importorskip("s3fs", reason="s3fs is not installed")
pytest.importorskip("moto.server", reason="moto[server] is not installed")
save = pytest.importorskip("workers.checkpoint").save
torch = pytest.importorskip("torch")


def test_a_node_uploads_and_another_node_lists_verifies_and_stages(bucket, tmp_path):
    a, b = (CheckpointMirror(PoolStorage(tmp_path / name), "p", bucket, {"j": 1}.get) for name in "ab")
    for step in (1, 2):
        path = save(a._storage.make_folder("j"), step, {"t": {"w": torch.full((9_000_000,), float(step))}}).path
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

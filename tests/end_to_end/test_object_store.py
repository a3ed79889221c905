"""A real fleet with a pool whose storage is an S3 bucket behind HTTP: lose the node's disk, resume, clean up."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import wait_for
from s3_server import S3Server

from orchestrator import Orchestrator, RunJob, TrainJob

pytestmark = pytest.mark.full
FLEET = """
name: stored
pools:
  store: {backend: cpu, storage: "%s"}
  disk: {backend: cpu}
"""


@pytest.fixture(scope="module")
def bucket_uri(s3: S3Server) -> str:
    return f"s3://{s3.make_bucket()}/runs"


@pytest.fixture(scope="module")
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stored")


@pytest.fixture(scope="module")
def stored_fleet(s3: S3Server, bucket_uri: str, own_home: Path) -> Iterator[Orchestrator]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ({"POLYFLEET_HOME": str(own_home)} | s3.variables).items():
            patch.setenv(name, value)
        (own_home / "fleet.yaml").write_text(FLEET % bucket_uri)
        with Orchestrator.up(own_home / "fleet.yaml") as o:
            yield o
            o.down()


def pending(o: Orchestrator) -> int:
    return sum(node["pending_uploads"] for node in o.inventory())


def steps(o: Orchestrator, pool: str, folder: str) -> list[int]:
    return sorted(row["step"] for row in o.checkpoints.list(pool, folder))


def test_a_training_outlives_the_disk_of_its_node_and_its_checkpoints_are_pinned_pruned_and_copied(
    stored_fleet: Orchestrator, own_home: Path, bucket_uri: str, s3: S3Server, train_file: Path, tmp_path: Path
):
    o, go_on = stored_fleet, tmp_path / "go-on"
    arguments: dict[str, Any] = {"steps": 20, "hold_at": 12, "go_on": str(go_on)}
    code = {"entry": train_file.name, "working_dir": str(train_file.parent)}
    job = o.submit(TrainJob(**code, arguments=arguments, checkpoint={"keep": 9}, resources={"pool": "store"}))
    prefix = f"{bucket_uri.removeprefix('s3://')}/{job.id}"
    wait_for(lambda: len(s3.files().glob(f"{prefix}/*/MANIFEST.json")) == 2, lambda: o.fleet.doctor(), 180)
    wait_for(lambda: pending(o) == 0)

    job.cancel()
    job.wait()
    shutil.rmtree(own_home / "storage" / "store" / job.id)
    assert steps(o, "store", job.id) == [5, 10], "they are in the store alone"

    go_on.touch()
    code |= {"checkpoint": {"resume_from": f"store:{job.id}", "keep": 9}}
    resumed = o.submit(TrainJob(**code, arguments=arguments, resources={"pool": "store"}))
    assert resumed.result()["returned"]["first"] == 10
    wait_for(lambda: pending(o) == 0)

    oldest = min(o.checkpoints.list("store", job.id), key=lambda row: int(row["step"]))["ref"]
    assert o.checkpoints.pin(oldest)["pinned"]
    pruned = o.checkpoints.prune(f"store:{job.id}", keep=1)
    assert (len(pruned["kept"]), pruned["deleted"]) == (2, [])
    o.checkpoints.pin(oldest, remove=True)
    assert len(o.checkpoints.prune(f"store:{job.id}", keep=1)["deleted"]) == 1
    assert steps(o, "store", job.id) == [10] and len(s3.files().ls(prefix)) == 1

    copied = o.checkpoints.copy(f"store:{job.id}", "disk:copied")
    assert copied["step"] == 10 and steps(o, "disk", "copied") == [10]
    o.checkpoints.copy("disk:copied", "store:returned")
    wait_for(lambda: s3.files().glob(f"{bucket_uri.removeprefix('s3://')}/returned/*/MANIFEST.json"), "", 180)


WRITES_TWICE = """
echo $POLYFLEET_EPOCH >> $POLYFLEET_OUTPUT_DIR/seen
test $(wc -l < $POLYFLEET_OUTPUT_DIR/seen) = 2 || sleep 600
"""


def test_files_of_a_job_outlive_the_disk_of_its_node_and_its_next_attempt_starts_with_them(
    stored_fleet: Orchestrator, own_home: Path, bucket_uri: str, s3: S3Server, tmp_path: Path
):
    o = stored_fleet
    job = o.submit(RunJob(command=WRITES_TWICE, resources={"pool": "store"}, recovery={"grace": "1s"}))
    prefix, folder = f"{bucket_uri.removeprefix('s3://')}/.files/{job.id}", own_home / "storage" / "store" / job.id
    wait_for(lambda: (folder / "output-1/seen").exists() and (folder / "output-1/seen").read_text() == "1\n")
    (node,) = (row["node"] for row in o.inventory() if row["pool"] == "store")
    o.nodes.drain(node, now=True)
    wait_for(lambda: s3.files().glob(f"{prefix}/output-1/*/FILES.json"), lambda: o.fleet.doctor(), 180)
    wait_for(lambda: pending(o) == 0)
    shutil.rmtree(folder)

    o.nodes.resume(node)
    assert job.wait().state == "SUCCEEDED"
    wait_for(lambda: s3.files().glob(f"{prefix}/output-2/*/FILES.json"), lambda: o.fleet.doctor(), 180)
    wait_for(lambda: not s3.files().glob(f"{prefix}/output-1/*"))
    wait_for(lambda: pending(o) == 0)

    shutil.rmtree(folder)
    job.get("seen", str(tmp_path / "seen"))
    assert (tmp_path / "seen").read_text() == "1\n2\n" and (folder / "output-2/seen").exists()

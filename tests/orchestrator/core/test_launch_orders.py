from dataclasses import fields

from cluster.types import NodeFacts
from orchestrator.core.jobs.fold import Attempt, Record
from orchestrator.core.model import Candidate, Job, Recovery
from orchestrator.core.step.launch_orders import OF_THE_LAUNCH, NodeShare, orders
from workers.protocol.messages import PROTOCOL, Order

CANDIDATE = Candidate(
    kinds=("cpu",),
    precision="bf16",
    batch_size=8,
    environment={"A": "1"},
    command=("true",),
    arguments={"lr": 1},
    launch="ranks",
)
JOB = Job(
    *("j", "name", "train", (CANDIDATE,)),
    recovery=Recovery(grace_s=3.0, lease_s=7.0, hang_after_s=9.0, on_events={"nan": "ignore"}),
    entry="t.py",
    seed=5,
    package="abc",
    keep_checkpoints=2,
    resume_from="cpu:other/step-1",
    output_limit_bytes=10,
    epoch=4,
    backend="tpu",
)
FACTS = NodeFacts(
    *("cpu-0", "ray-0", "host", "10.0.0.1", "cpu", "cpu", "cpu"), PROTOCOL, {}, (), 8, 1, 1, 0.0, 1, 1, "/data"
)


def test_an_order_has_the_fields_of_its_job_candidate_and_recovery(w):
    attempt = Attempt(4, 0, "cpu", "cpu", (("cpu-0/cpu", (0,)),), 0.0)
    [order] = orders(Record(JOB, attempts=(attempt,)), [NodeShare(w.cpu(), (0,), FACTS)])
    assert order == Order(
        job="j",
        epoch=4,
        task="train",
        backend="cpu",
        kind="cpu",
        emulated=False,
        devices=(0,),
        node_rank=0,
        nodes=1,
        first_rank=0,
        ranks=1,
        world_size=1,
        master_address="",
        master_port=0,
        entry="t.py",
        command=("true",),
        launch="ranks",
        arguments={"lr": 1},
        code_archive="abc",
        environment={"A": "1"},
        checkpoint_root="/data/j",
        keep_checkpoints=2,
        precision="bf16",
        batch_size=8,
        seed=5,
        grace_s=3.0,
        lease_s=7.0,
        hang_after_s=9.0,
        stop_on_nan=False,
        output_limit_bytes=10,
    )


def test_what_the_launch_sets_itself_are_fields_of_orders():
    assert {f.name for f in fields(Order)} > OF_THE_LAUNCH

from orchestrator.core.fold import Ledger, placed, submitted
from orchestrator.core.model import Devices, Start
from orchestrator.runtime.live import live_of
from orchestrator.runtime.orders import Share, orders
from orchestrator.spec import parse_job


def placed_job(spec: dict, leases: tuple) -> tuple:
    job = parse_job(spec).to_job("j-1", 1.0)
    ledger = Ledger()
    ledger.apply(submitted(job, spec, "sha", 1.0))
    ledger.apply(placed(job, Start("j-1", 0, leases), "cpu", "left", 2.0))
    return ledger.records["j-1"], parse_job(spec)


def shares(record) -> list[Share]:
    have = Devices("n/cpu", "n", "left", "main", "cpu", "cpu", (), 2)
    return [Share(part, have, f"/store/{part.node}") for part in live_of(record).parts]


def test_a_gang_numbers_its_ranks_over_the_nodes_in_order():
    spec = {"entry": "train.py", "resources": {"accelerators": "cpu:2", "nodes": 2}}
    record, parsed = placed_job(spec, (("a/cpu", (0, 1)), ("b/cpu", (0, 1))))
    first, second = orders(record, parsed, shares(record), ("10.0.0.1", 1234), None)
    assert (first.first_rank, first.ranks, second.first_rank, second.ranks) == (0, 2, 2, 2)
    assert {(o.world_size, o.nodes, o.master_address, o.master_port) for o in (first, second)} == {
        (4, 2, "10.0.0.1", 1234)
    }
    assert (first.node_rank, second.node_rank, second.devices) == (0, 1, (0, 1))


def test_a_command_is_one_process_per_node_whatever_it_leases():
    record, parsed = placed_job({"command": "true", "resources": {"accelerators": "cpu:2"}}, (("a/cpu", (0, 1)),))
    [order] = orders(record, parsed, shares(record), ("127.0.0.1", 1), None)
    assert (order.ranks, order.world_size, order.devices) == (1, 1, (0, 1))
    assert order.command == ("/bin/sh", "-c", "true")


def test_what_the_candidate_overrides_is_ordered_and_the_checkpoint_is_where_the_node_sees_it():
    spec = {
        "entry": "train.py",
        "env": {"A": "1", "B": "1"},
        "batch_size": 8,
        "seed": 7,
        "resources": {"any_of": [{"accelerators": "cpu", "env": {"B": "2"}, "batch_size": 4, "precision": "bf16"}]},
    }
    record, parsed = placed_job(spec, (("a/cpu", (0,)),))
    [order] = orders(
        record, parsed, shares(record), ("127.0.0.1", 1), {"pool": "left", "path": "j-1/step-5", "step": 5}
    )
    assert (order.environment, order.batch_size, order.precision) == ({"A": "1", "B": "2"}, 4, "bf16")
    assert (order.checkpoint_root, order.resume_from) == ("/store/a/j-1", "/store/a/j-1/step-5")
    assert (order.epoch, order.package, order.keep_checkpoints, order.seed) == (1, "sha", 3, 7)

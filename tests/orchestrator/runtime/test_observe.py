from cluster.vocabulary import Device, NodeFacts
from orchestrator.runtime.agents import Agent
from orchestrator.runtime.observe import groups, pool_view
from orchestrator.runtime.reservations import bundle

GIB = 1 << 30


def gpu(index: int, kind: str = "nvidia:A100-40GB", reason: str = "") -> Device:
    return Device("nvidia", kind, index, "A100", total_memory_bytes=40 * GIB, unavailable_reason=reason)


def agent(*devices: Device, lost: str = "") -> Agent:
    facts = NodeFacts(
        "n", "id", "host", "10.0.0.1", "big", "nvidia", "cuda", 1, {}, devices, 8, GIB, GIB, 0.0, GIB, 1, "/store"
    )
    return Agent("id", None, facts, lost)


def seen(a: Agent, held: dict | None = None) -> list:
    return groups("n", a, a.facts, {"big": 2.5}, held or {})


def test_equal_devices_of_a_node_are_one_group_without_what_is_leased():
    [have] = seen(agent(gpu(0), gpu(1), gpu(2)), {"n/nvidia:A100-40GB": {1: "job"}})
    assert (have.id, have.free, have.total, have.price_per_hour) == ("n/nvidia:A100-40GB", (0, 2), 3, 2.5)
    assert have.memory_bytes == 40 * GIB and have.schedulable


def test_two_kinds_on_one_node_are_two_groups():
    kinds = [d.kind for d in seen(agent(gpu(0), gpu(1, "nvidia:A100-80GB")))]
    assert kinds == ["nvidia:A100-40GB", "nvidia:A100-80GB"]


def test_a_device_that_cannot_be_used_is_no_place_and_says_why():
    good, bad = seen(agent(gpu(0), gpu(1, reason="XID 79: fallen off the bus")))
    assert good.free == (0,) and good.schedulable
    assert not bad.schedulable and bad.reason == "XID 79: fallen off the bus" and bad.id != good.id


def test_devices_of_a_lost_node_take_nothing_and_are_not_counted():
    lost = agent(gpu(0), lost="Ray reports the node dead")
    [have] = seen(lost)
    assert not have.schedulable and "Ray reports the node dead" in have.reason
    assert pool_view("big", {"nodes": 1}, [("n", lost)], {})["devices"] == 0


def test_a_reservation_costs_the_devices_own_resource_and_a_cpu_its_share_of_the_cores():
    assert bundle("nvidia", False, 2, 8, 64.0) == {"GPU": 2.0}
    assert bundle("tpu", False, 4, 4, 64.0) == {"TPU": 4.0}
    assert bundle("cpu", False, 1, 2, 8.0) == {"CPU": 4.0}
    assert bundle("tpu", True, 1, 1, 8.0) == {"CPU": 8.0}

"""Back ends as the fleet has them: available with kinds and pools, or absent with a reason."""

from cluster.catalogue import vendors
from orchestrator.client.inventory import backend_rows


def node(name, backend, kinds=(), state="ready", state_reason="", reason=""):
    common = {"backend": backend, "unavailable_reason": reason, "emulated": False, "index": 0}
    memory = {"total_memory_bytes": 80 << 30, "free_memory_bytes": 79 << 30}
    devices = [common | memory | {"kind": k, "name": f"card {k}"} for k in kinds]
    return {
        "node": name,
        "pool": name,
        "backend": backend,
        "state": state,
        "reason": state_reason,
        "devices": devices,
        "versions": {"torch": "2.13"},
    }


def reasons(nodes):
    return {row["backend"]: (row["available"], row["reason"]) for row in backend_rows(nodes)}


def test_every_back_end_has_a_row_in_the_order_of_the_table():
    assert [row["backend"] for row in backend_rows([])] == list(vendors())
    assert set(reasons([]).values()) == {(False, "the fleet has no pool of this back end")}


def test_kinds_and_pools_of_one_back_end_are_joined():
    rows = backend_rows([node("b", "cpu", ["cpu:ipex"]), node("a", "cpu", ["cpu", "cpu"])])
    cpu = next(row for row in rows if row["backend"] == "cpu")
    assert (cpu["kinds"], cpu["pools"], len(cpu["devices"]), cpu["torch"]) == (
        ["cpu", "cpu:ipex"],
        ["a", "b"],
        3,
        ["2.13"],
    )
    assert cpu["recommended"]


def test_what_is_lost_starting_unavailable_or_not_found_says_so():
    told = reasons(
        [
            node("gone", "nvidia", ["nvidia:H100"], state="lost", state_reason="no answer"),
            node("denied", "amd", ["amd:MI300X"], reason="no permission"),
            node("empty", "intel"),
            node("new", "", state="starting"),
        ]
    )
    assert told["nvidia"] == (False, "node gone: lost: no answer")
    assert told["amd"] == (False, "card amd:MI300X: no permission")
    assert told["intel"] == (False, "no Intel GPU was detected on empty")


def test_usable_back_ends_come_first_and_the_best_device_is_recommended():
    rows = backend_rows([node("c", "cpu", ["cpu"]), node("t", "tpu", ["tpu:v5e"]), node("n", "nvidia", ["nvidia:T4"])])
    assert [row["backend"] for row in rows[:3]] == ["nvidia", "tpu", "cpu"]
    assert [row["backend"] for row in rows if row["recommended"]] == ["tpu"]
    assert rows[0]["devices"] == [
        {
            "device": "n: 0",
            "name": "card nvidia:T4",
            "kind": "nvidia:T4",
            "total_bytes": 80 << 30,
            "free_bytes": 79 << 30,
            "reason": "",
        }
    ]

"""Whether the hosts of a pool see one storage, and what is told where they do not."""

from dataclasses import replace

import pytest

from cluster.errors import SpecError
from cluster.fleet.fleet_spec import parse_fleet
from cluster.hosts.shared_storage import KEEP_REMEDY, findings, warnings
from cluster.types import NodeFacts

APART = "pool far has 2 separate storages (a and c; b): a lost host takes its checkpoints with it"
SEEN = {"far": {"a": "1", "b": "2", "c": "1"}, "near": {"a": "3", "b": "3"}, "one": {"a": "4"}}


def test_hosts_with_storages_of_their_own_are_told_with_what_to_do():
    assert warnings({}, SEEN) == [f"{APART}; {KEEP_REMEDY}"]


def test_a_storage_that_is_to_be_shared_and_is_not_is_refused_with_its_hosts():
    with pytest.raises(SpecError) as refused:
        warnings({"far": True}, SEEN)
    assert (refused.value.field, refused.value.exit_code) == ("pools.far.shared_storage", 2)
    assert APART in refused.value.message
    assert warnings({"near": True, "one": True}, {name: SEEN[name] for name in ("near", "one")}) == []


def test_a_host_that_cannot_tell_is_refused_only_where_sharing_is_asked_for():
    assert warnings({}, {"far": {"a": "1", "b": ""}}) == []
    with pytest.raises(SpecError, match="the storage of b can neither be written nor read"):
        warnings({"far": True}, {"far": {"a": "1", "b": ""}})


def test_doctor_tells_of_storages_on_several_machines_only():
    here = ("ray", "h", "10.0.0.1", "far", "cpu", "main", 1, {}, (), 1, 1, 1, 0.0, 1, 1, "/s")
    first, beside = (NodeFacts(name, *here, storage_id=name) for name in "ab")
    away = replace(beside, host="other", address="10.0.0.2")
    assert list(findings([first, beside], {})) == []
    for shared, level in ((False, "info"), (True, "error")):
        [found] = findings([first, away], {"far": shared})
        assert (found.level, found.message.partition(":")[0]) == (level, "pool far has 2 separate storages (a; b)")


def test_nodes_that_upload_to_an_object_store_need_no_storage_in_common():
    here = ("ray", "h", "10.0.0.1", "far", "cpu", "main", 1, {}, (), 1, 1, 1, 0.0, 1, 1, "/s")
    first = NodeFacts("a", *here, storage_id="a", object_store="s3://bucket/runs")
    assert list(findings([first, replace(first, node="b", host="other", storage_id="b")], {})) == []


def test_only_a_pool_with_hosts_can_say_that_they_share_a_storage():
    with pytest.raises(SpecError, match="applies to pools with hosts"):
        parse_fleet({"pools": {"cpu": {"backend": "cpu", "shared_storage": True}}})

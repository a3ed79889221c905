"""What a fleet file may say of other machines, and what is told where it cannot be meant."""

import pytest

from cluster.errors import SpecError
from cluster.fleet.fleet_spec import parse_fleet
from cluster.hosts import survey

HEAD = {"address": "10.0.0.1"}


def fleet(**pools):
    return parse_fleet({"head": HEAD, "pools": pools})


def refused(**pools):
    with pytest.raises(SpecError) as caught:
        fleet(**pools)
    return caught.value


def test_a_word_is_a_host_and_each_host_has_a_node_named_after_it():
    spec = fleet(gpu={"backend": "nvidia", "hosts": ["gpu-a", {"host": "GPU-B.lab", "address": "10.0.0.8"}]})
    assert [p.node for p in spec.placements] == ["gpu-gpu-a", "gpu-gpu-b-lab"]
    assert spec.placements[1].host.address == "10.0.0.8"


def test_a_pool_with_hosts_has_the_main_environment_unless_it_names_one():
    spec = fleet(
        a={"backend": "cpu", "hosts": ["x"]}, b={"backend": "cpu", "hosts": ["x"], "environment": {"interpreter": "/p"}}
    )
    assert spec.pools["a"].environment.lock == "main"
    assert spec.pools["b"].environment.interpreter == "/p"


def test_the_ssh_of_a_pool_goes_over_that_of_the_fleet_field_by_field():
    spec = parse_fleet(
        {
            "head": HEAD,
            "ssh": {"user": "alice", "jump": "gate"},
            "pools": {"a": {"backend": "cpu", "hosts": ["x"], "ssh": {"user": "bob"}}},
        }
    )
    ssh = spec.placements[0].ssh
    assert (ssh.user, ssh.jump) == ("bob", "gate")


def test_what_is_here_and_what_a_host_has_are_parts_of_the_fleet():
    spec = fleet(
        cpu={"backend": "cpu"},
        far={"backend": "cpu", "devices": 2, "hosts": ["a", {"host": "b", "devices": 4}]},
    )
    assert list(spec.local_part().pools) == ["cpu"]
    assert spec.on_host("a").pools["far"].devices == 2
    assert spec.on_host("b").pools["far"].devices == 4
    assert spec.on_host("b").pools["far"].hosts == ()


def test_hosts_without_an_address_of_the_head_are_refused():
    with pytest.raises(SpecError, match="loopback only") as caught:
        parse_fleet({"pools": {"a": {"backend": "cpu", "hosts": ["x"]}}})
    assert caught.value.field == "head.address"


@pytest.mark.parametrize(
    "pool, field, said",
    [
        ({"hosts": ["x", "x"]}, "pools.a.hosts", "twice"),
        ({"hosts": ["x"], "nodes": 2}, "pools.a.nodes", "one node on each"),
        ({"hosts": ["x"], "min_hosts": 2}, "pools.a.min_hosts", "2 hosts are required, and the pool has 1"),
        ({"hosts": ["x"], "environment": {"interpreter": "current"}}, "pools.a.environment", "this machine"),
        ({"hosts": ["-oProxyCommand=x"]}, "pools.a.hosts.0", "not a host name"),
        ({"hosts": ["a b"]}, "pools.a.hosts.0", "not a host name"),
        ({"hosts": [{"host": "x", "address": "x"}]}, "pools.a.hosts.0.address", "not an IP address"),
        ({"hosts": ["x"], "ssh": {"user": "-l"}}, "pools.a.ssh.user", "not a user name"),
        ({"hosts": ["x"], "ssh": {"jump": "-W"}}, "pools.a.ssh.jump", "jump hosts"),
        ({"hosts": ["x"], "ssh": {"key": "key"}}, "pools.a.ssh.key", "absolute path"),
    ],
)
def test_a_mistake_names_its_field(pool, field, said):
    error = refused(a={"backend": "cpu", **pool})
    assert error.field.startswith(field)
    assert said in str(error)


def test_two_pools_cannot_have_the_same_accelerators_but_may_share_a_host():
    error = refused(a={"backend": "nvidia", "hosts": ["x"]}, b={"backend": "nvidia", "hosts": ["x"]})
    assert "both have the nvidia devices of host x" in str(error)
    assert len(fleet(a={"backend": "nvidia", "hosts": ["x"]}, b={"backend": "amd", "hosts": ["x"]}).placements) == 2


@pytest.mark.parametrize(
    "head, pools, field, said",
    [
        ({"host": "m"}, {"a": {"backend": "cpu", "hosts": ["x"]}}, "head.address", "beside head.host"),
        ({"host": "m", "address": "10.0.0.2"}, {"a": {"backend": "cpu"}}, "pools.a.hosts", "no nodes on this machine"),
        (
            {"host": "m", "address": "10.0.0.2"},
            {"a": {"backend": "cpu", "hosts": [{"host": "m", "address": "10.0.0.3"}]}},
            "pools.a.hosts",
            "has the head at 10.0.0.2, and its address is 10.0.0.3 here",
        ),
        ({"host": "-l", "address": "10.0.0.2"}, {"a": {"backend": "cpu", "hosts": ["x"]}}, "head.host", "not a host"),
    ],
)
def test_a_head_on_a_host_needs_its_address_and_pools_with_hosts(head, pools, field, said):
    with pytest.raises(SpecError, match=said) as caught:
        parse_fleet({"head": head, "pools": pools})
    assert caught.value.field == field


def test_the_host_of_the_head_is_looked_at_once_and_has_its_nodes_too():
    head = {"host": "M.lab", "address": "10.0.0.2"}
    alone = parse_fleet({"head": head, "pools": {"a": {"backend": "cpu", "hosts": [{"host": "10.0.0.3"}]}}})
    assert [(v.name, v.request.leads, v.nodes) for v in survey.visits(alone)] == [
        ("m-lab", True, ()),
        ("10-0-0-3", False, ("a-10-0-0-3",)),
    ]
    with_nodes = parse_fleet({"head": head, "pools": {"a": {"backend": "cpu", "hosts": ["M.lab"]}}})
    [visit] = survey.visits(with_nodes)
    assert visit.request.leads and visit.request.address == "10.0.0.2" and visit.nodes == ("a-m-lab",)

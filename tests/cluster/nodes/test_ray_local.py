"""Which Ray node of a machine a driver may use. Ray's rows are written down here; sockets and addresses are real."""

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.host.processes import identify
from cluster.nodes.ray_local import LocalNode, address_towards, addresses_here, choose, local_nodes

OWN = identify(os.getpid())
HEAD, WORKER, OURS, OTHERS = (f"{number:056x}" for number in range(4))


@pytest.fixture
def sockets(tmp_path: Path):
    made = []
    for name in ("raylet", "store"):
        made.append(socket.socket(socket.AF_UNIX))
        made[-1].bind(str(tmp_path / name))
    yield [str(tmp_path / name) for name in ("raylet", "store")]
    for s in made:
        s.close()


def row(ray_id: str, sockets: list[str], address: str = "10.0.0.1"):
    """As Ray's GcsNodeInfo."""
    raylet, store = sockets
    return SimpleNamespace(
        node_id=bytes.fromhex(ray_id),
        node_manager_address=address,
        is_head_node=ray_id == HEAD,
        labels={},
        raylet_socket_name=raylet,
        object_store_socket_name=store,
    )


def test_a_node_counts_that_is_at_an_address_of_this_machine_runs_here_and_lets_us_in(sockets, tmp_path: Path):
    raylets = dict.fromkeys((HEAD, WORKER), OWN)

    def found(*rows) -> list[str]:
        return [node.ray_id for node in local_nodes(rows, {"10.0.0.1", "127.0.0.1"}, raylets)]

    assert found(row(HEAD, sockets), row(WORKER, sockets)) == [HEAD, WORKER]
    assert found(row(HEAD, sockets, "10.0.0.2")) == [], "another machine's"
    assert found(row(OTHERS, sockets)) == [], "its raylet is in another container, or has ended"
    assert found(row(HEAD, [str(tmp_path / "none"), sockets[1]])) == [], "its socket lies in another file system"


def node(ray_id: str, **labels: str) -> LocalNode:
    named = {f"polyfleet.io/{name}": value for name, value in labels.items()}
    return LocalNode(ray_id, "10.0.0.1", OWN, ray_id == HEAD, named)


def test_our_own_node_goes_first_then_the_head_and_that_of_another_home_is_left_alone():
    ours, others = node(OURS, role="server", fleet="mine"), node(OTHERS, role="server", fleet="theirs")
    assert choose([node(HEAD), others, ours], "mine") == ours
    assert choose([node(WORKER), node(HEAD), others], "mine") == node(HEAD)
    assert choose([others], "mine") is None


def test_the_address_towards_a_cluster_is_one_of_this_machine():
    assert address_towards("127.0.0.1:6379") == "127.0.0.1"
    assert "127.0.0.1" in addresses_here()

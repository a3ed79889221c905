"""Hosts behind a jump host, with a real sshd on each: m1 leads to m2."""

import pytest
from bed import Bed
from patience import LIMIT_S

from cluster.errors import PolyfleetError
from cluster.fleet.host_spec import SSHSpec
from cluster.hosts.ssh import CompletedCommand, Remote
from cluster.hosts.ssh_errors import HostRefused, HostUnreachable

pytestmark = pytest.mark.full


def connect(config: object) -> CompletedCommand:
    remote = Remote("m2", SSHSpec(config=str(config), jump="m1"))
    return remote.run(["sh", "-c", "hostname; echo $SSH_CONNECTION; cat"], b"bytes", timeout_s=LIMIT_S)


def refusal(config: object) -> PolyfleetError:
    with pytest.raises(PolyfleetError) as raised:
        connect(config)
    return raised.value


def test_commands_and_their_input_go_through_the_jump_host(bed: Bed):
    name, connection, received = connect(bed.ssh_config).output.decode().splitlines()
    assert (name, connection.split()[0], received) == ("m2", bed.addresses["m1"], "bytes")


def test_an_unknown_key_of_the_jump_host_is_rejected(bed: Bed):
    error = refusal(bed.client_config("no-keys", known=False))
    assert isinstance(error, HostRefused)
    assert "jump host m1" in str(error)


def test_an_unknown_key_of_the_host_behind_it_is_rejected(bed: Bed):
    config = bed.client_config("key-of-m1")
    known = config.with_name(f"{config.name}.known-hosts")
    known.write_text("".join(line for line in known.read_text().splitlines(True) if line.startswith("m1,")))
    error = refusal(config)
    assert isinstance(error, HostRefused)
    assert "the key of host m2" in str(error)


def test_a_jump_host_that_refuses_the_key_is_named(bed: Bed):
    error = refusal(bed.client_config("stranger", identity=bed.stranger.file))
    assert isinstance(error, HostRefused)
    assert "jump host m1 refuses our key" in str(error)


def test_a_host_that_is_off_is_named_with_its_jump_host(bed: Bed):
    bed.machines["m2"].power_off()
    error = refusal(bed.ssh_config)
    assert isinstance(error, HostUnreachable)
    assert "host m2 cannot be reached" in str(error)
    assert "jump host m1" in str(error)


def test_a_jump_host_that_is_off_is_named(bed: Bed):
    bed.machines["m1"].power_off()
    error = refusal(bed.ssh_config)
    assert isinstance(error, HostUnreachable)
    assert "jump host m1" in str(error)
    print(error)

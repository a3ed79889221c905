"""How ssh is asked, and what becomes of what it says. Connections are tried on real machines in tests/machines."""

import itertools

import pytest

from cluster.fleet.host_spec import SSHSpec
from cluster.hosts import host_steps
from cluster.hosts.ssh import Remote
from cluster.hosts.ssh_errors import HostRefused, HostUnreachable, failure


def test_settings_become_options_and_the_command_is_one_word():
    ssh = SSHSpec(user="u", key="/k", port=2222, config="/c", jump="g")
    words = Remote("a.lab", ssh).command(["sh", "-c", "a 'b'"])
    assert words[0] == "ssh"
    pairs = set(itertools.pairwise(words))
    assert pairs >= {("-F", "/c"), ("-i", "/k"), ("-l", "u"), ("-p", "2222"), ("-J", "g")}
    assert pairs >= {("-o", "StrictHostKeyChecking=yes"), ("-o", "BatchMode=yes"), ("-o", "ConnectTimeout=20")}
    assert words[-3:] == ["--", "a.lab", """exec sh -c 'a '"'"'b'"'"''"""]


@pytest.mark.parametrize(
    "said, kind, told",
    [
        ("ssh: Could not resolve hostname nope: Name or service not known", HostRefused, "host h is unknown"),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @", HostRefused, "is not the one in known_hosts"),
        ("No ED25519 host key is known for h\nHost key verification failed.", HostRefused, "in any known_hosts file"),
        ("u@h: Permission denied (publickey).", HostRefused, "refuses our key"),
        ("ssh: connect to host h port 22: Connection refused", HostUnreachable, "Connection refused"),
        ("ssh: connect to host h port 22: Connection timed out", HostUnreachable, "timed out"),
        ("", HostUnreachable, "ssh gave no reason"),
    ],
)  # fmt: skip
def test_what_ssh_says_becomes_a_sentence_with_the_host(said, kind, told):
    error = failure("h", said)
    assert type(error) is kind
    assert told in str(error)
    assert error.remedy


CLOSED = "kex_exchange_identification: Connection closed by remote host"


@pytest.mark.parametrize(
    "stderr, kind, message",
    [
        ("Host key verification failed.", HostRefused, "key of jump host gate is not in any"),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @", HostRefused, "key of jump host gate is not the one"),
        ("u@gate: Permission denied (publickey).", HostRefused, "jump host gate refuses our key"),
        ("ssh: Could not resolve hostname gate: Name or service not known", HostRefused, "jump host gate is unknown"),
        ("ssh: connect to host gate port 22: Connection refused", HostUnreachable, "jump host gate cannot be reached"),
        (
            "channel 0: open failed: connect failed: No route to host\nstdio forwarding failed", HostUnreachable,
            "host h cannot be reached from jump host gate: connect failed: No route to host",
        ),
        (
            "channel 0: open failed: administratively prohibited: open failed\nstdio forwarding failed",
            HostUnreachable, "host h cannot be reached from jump host gate: administratively prohibited: open failed",
        ),
    ],
)  # fmt: skip
def test_an_error_names_the_jump_host_if_the_connection_ended_there(stderr, kind, message):
    """As OpenSSH 9.2 prints it."""
    error = failure("h", f"{stderr}\n{CLOSED}", jump="gate")
    assert type(error) is kind
    assert message in str(error)
    assert "gate" in str(error.remedy) or kind is HostRefused


@pytest.mark.parametrize("stderr", ["h: Permission denied (publickey).", CLOSED])
def test_an_error_names_the_host_behind_a_jump_host_that_forwards(stderr):
    assert str(failure("h", stderr, jump="gate")).startswith("host h ")


@pytest.mark.parametrize(("rate", "words"), [("", []), ("50 MB", ["POLYFLEET_COPY_RATE=50 MB"])])
def test_nodes_of_a_host_get_the_limit_for_copies_that_up_was_given(monkeypatch, rate, words):
    monkeypatch.setenv("POLYFLEET_COPY_RATE", rate)
    command = host_steps._host_command("/python", "/code", "/home", "join")
    assert command[:3] == ["env", "PYTHONPATH=/code", "POLYFLEET_HOME=/home"]
    assert command[3:] == [*words, "/python", "-P", "-m", "workers.node.host", "join"]

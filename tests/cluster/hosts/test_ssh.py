"""How ssh is asked, and what becomes of what it says. Connections are tried on real machines in tests/machines."""

import itertools

import pytest

from cluster.fleet.host_spec import SSHSpec
from cluster.hosts import host_steps
from cluster.hosts.ssh import HostRefused, HostUnreachable, Remote, failure


def test_settings_become_options_and_the_command_is_one_word():
    ssh = SSHSpec(user="u", key="/k", port=2222, config="/c", jump="g")
    words = Remote("a.lab", ssh).command(["sh", "-c", "a 'b'"])
    assert words[0] == "ssh"
    pairs = set(itertools.pairwise(words))
    assert pairs >= {("-F", "/c"), ("-i", "/k"), ("-l", "u"), ("-p", "2222"), ("-J", "g")}
    assert pairs >= {("-o", "StrictHostKeyChecking=yes"), ("-o", "BatchMode=yes")}
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


@pytest.mark.parametrize(("rate", "words"), [("", []), ("50 MB", ["POLYFLEET_COPY_RATE=50 MB"])])
def test_nodes_of_a_host_get_the_limit_for_copies_that_up_was_given(monkeypatch, rate, words):
    monkeypatch.setenv("POLYFLEET_COPY_RATE", rate)
    command = host_steps._host_command("/python", "/code", "/home", "join")
    assert command[:3] == ["env", "PYTHONPATH=/code", "POLYFLEET_HOME=/home"]
    assert command[3:] == [*words, "/python", "-P", "-m", "workers.node.host", "join"]

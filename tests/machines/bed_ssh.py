"""Keys and settings of SSH for machines: host keys, a key of the user, and files for `ssh -F` and sshd."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SSHD = """\
ListenAddress {address}
HostKey /run/host-key
AuthorizedKeysFile /run/authorized-keys
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PidFile none
PrintMotd no
Subsystem sftp internal-sftp
"""
CLIENT = """\
Host {names}
  User root
  IdentityFile {identity}
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile {known_hosts}
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  BatchMode yes
  ConnectTimeout 10
"""


@dataclass(frozen=True)
class Key:
    """`file` is the private half."""

    file: Path

    @property
    def private(self) -> str:
        return self.file.read_text()

    @property
    def public(self) -> str:
        """Kind and key, without the comment."""
        return " ".join(self.file.with_name(f"{self.file.name}.pub").read_text().split()[:2])


def new_key(file: Path) -> Key:
    """In place of the one there."""
    file.unlink(missing_ok=True)
    file.with_name(f"{file.name}.pub").unlink(missing_ok=True)
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(file)]
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    return Key(file)


def known_hosts(keys: Mapping[str, Key], addresses: Mapping[str, str]) -> str:
    return "".join(f"{name},{addresses[name]} {key.public}\n" for name, key in keys.items())


def client_config(addresses: Mapping[str, str], identity: Path, known: Path) -> str:
    """Machines answer to their names and to their addresses."""
    hosts = "".join(f"Host {name}\n  HostName {address}\n" for name, address in addresses.items())
    names = " ".join((*addresses, *addresses.values()))
    return hosts + CLIENT.format(names=names, identity=identity, known_hosts=known)

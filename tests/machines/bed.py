"""Three machines in one box, with a switch between them: network namespaces, each with its own processes and sshd.

Needs root, iproute2, iptables and sshd. All of it depends on this process: however it ends, the kernel takes machines,
switch and this host's plug in it away. Nothing listens on another interface of this host. All machines have this host's
clocks: a namespace of time moves monotonic clocks alone (a skewed wall clock is a library's work, as in
tests/chaos/skewed_clock.c).
"""

import ipaddress
import json
import os
import random
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bed_machine import Machine
from bed_ssh import client_config, known_hosts, new_key
from bed_wire import EVERYBODY, HOST, Faults, filters, shaping

NAMES = ("m1", "m2", "m3")
ROOT = Path(__file__).parents[2]
RELAY = Path(__file__).with_name("bed_relay.py")
PROGRAMS = ("ip", "tc", "iptables-restore", "unshare", "nsenter", "setpriv", "ssh", "ssh-keygen", "/usr/sbin/sshd")
HOST_NUMBER = 254


class Bed:
    """`machines` by name. `host` is this host's address in their network, `ssh_config` a file for `ssh -F` that knows
    them all, `shared` a folder that all see under the same path, as a mount of a file server.
    """

    def __init__(self, folder: Path, names: Sequence[str] = NAMES):
        self.folder, self.faults, self.machines = folder, Faults(), dict[str, Machine]()
        self._relays: dict[str, subprocess.Popen[bytes]] = {}
        self._plug = f"pf-{secrets.token_hex(4)}"
        self._switch = _in_own_network()
        try:
            self._make(names)
        except BaseException:
            self.close()
            raise

    def _make(self, names: Sequence[str]) -> None:
        network = free_network()
        self.host = str(network[HOST_NUMBER])
        self._wire_host(network.prefixlen)
        self.addresses = {name: str(network[number]) for number, name in enumerate(names, start=1)}
        self.identity, self.stranger = (new_key(self.folder / name) for name in ("user-key", "stranger-key"))
        self.shared = self.folder / "shared"
        self.shared.mkdir()
        shown = [*_shown(), (self.shared, False)]
        for name, address in self.addresses.items():
            self.machines[name] = Machine(name, address, self.folder / name, shown, self)
        for machine in self.machines.values():
            machine.begin_boot(self.told)
        for machine in self.machines.values():
            machine.end_boot()
        self.ssh_config = self.client_config("ssh-config")

    @property
    def told(self) -> dict[str, Any]:
        """What every machine's process 1 is told."""
        hosts = "".join(f"{address} {name}\n" for name, address in self.addresses.items())
        files = {
            "/etc/hosts": f"127.0.0.1 localhost\n{self.host} {HOST}\n{hosts}",
            "/etc/resolv.conf": "",
            "/etc/shadow": "root:*:1::::::\n",  # a locked root may not log in, with a key neither
            "/run/authorized-keys": f"{self.identity.public}\n",
            "/run/sshd/unused": "",
        }
        return {"files": files}

    def close(self) -> None:
        for machine in self.machines.values():
            machine.power_off()
        for process in (*self._relays.values(), self._switch):
            process.communicate()
        with suppress(subprocess.CalledProcessError):  # it goes with the switch, a moment later
            _ip(f"link del dev {self._plug}")

    # -- SSH

    def client_config(self, name: str, *, identity: Path | None = None, known: bool = True) -> Path:
        """A file for `ssh -F` as `ssh_config`: with the key in `identity` (as that of `stranger`, which no machine
        takes), or one to which no host key is `known`.
        """
        file, hosts = self.folder / name, self.folder / f"{name}.known-hosts"
        keys = {name: machine.key for name, machine in self.machines.items()} if known else {}
        hosts.write_text(known_hosts(keys, self.addresses))
        file.write_text(client_config(self.addresses, identity or self.identity.file, hosts))
        return file

    def ssh(self, name: str, command: str, config: Path | None = None) -> "subprocess.CompletedProcess[str]":
        words = ["ssh", "-F", str(config or self.ssh_config), name, command]
        return subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)

    # -- faults on the wire

    def cut(self, source: str, target: str = EVERYBODY, *, one_way: bool = False) -> None:
        """Between two of the machines and `host`, or between one and all others. `one_way`: what `source` sends does
        not arrive, what it is sent does.
        """
        self.faults.cuts |= {(source, target)} if one_way else {(source, target), (target, source)}
        self._apply()

    def loss(self, share: float, *names: str) -> None:
        """That share of the packets which arrive at these machines (all) is lost."""
        self.faults.loss |= dict.fromkeys(names or self.machines, share)
        self._apply()

    def rate(self, rate: str, *names: str) -> None:
        """These machines (all) send and receive no faster than this, as tc writes it: `1mbit`, `1mbps` is of bytes."""
        self.faults.rate |= dict.fromkeys(names or self.machines, rate)
        self._apply()

    def delay(self, delay_s: float, *names: str) -> None:
        """What these machines (all) send and receive is late by so much, each."""
        self.faults.delay_s |= dict.fromkeys(names or self.machines, delay_s)
        self._apply()

    def heal(self) -> None:
        """No fault is left, on the wire or of a machine. Those that are off stay off."""
        self.faults = Faults()
        self._apply()
        for machine in self.machines.values():
            machine.heal()

    def _apply(self) -> None:
        for machine in self.machines.values():
            if machine.is_up:
                self._fault(machine)

    def _fault(self, machine: Machine) -> None:
        name = machine.name
        rules = filters(name, self.faults, self.addresses | {HOST: self.host})
        subprocess.run(_network_of(machine.init, "iptables-restore"), input=rules.encode(), check=True)
        for pid, device in ((machine.init, "eth0"), (self._switch.pid, name)):
            *tries, last = shaping(device, self.faults.rate.get(name))
            for command in tries:
                subprocess.run(_network_of(pid, *command), capture_output=True, check=False)
            subprocess.run(_network_of(pid, *last), capture_output=True, check=len(tries) > 0)
        self._delay(name, self.faults.delay_s.get(name, 0.0))

    def _delay(self, name: str, delay_s: float) -> None:
        """Between the machine's port and the switch a relay: the port is in a bridge with its near end."""
        near, far, bridge = f"{name}-near", f"{name}-far", f"{name}-br"
        if (relay := self._relays.pop(name, None)) is not None:
            relay.communicate()
            self._in_switch(f"link set dev {name} master br0", f"link del dev {bridge}")
        if not delay_s:
            return
        words = _network_of(self._switch.pid, sys.executable, "-I", "-S", str(RELAY), near, far, str(delay_s))
        relay = self._relays[name] = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert relay.stdout is not None and relay.stdout.readline() == b"ready\n", "the relay did not start"
        ends = (f"link set dev {near} master {bridge}", f"link set dev {near} up", f"link set dev {far} master br0")
        made = (f"link add name {bridge} type bridge", f"link set dev {bridge} up", *ends, f"link set dev {far} up")
        self._in_switch(*made, f"link set dev {name} master {bridge}")

    # -- the switch

    def plug_in(self, machine: Machine) -> None:
        port = f"link add name {machine.name} type veth peer name eth0 netns {machine.init}"
        self._in_switch(port, f"link set dev {machine.name} master br0", f"link set dev {machine.name} up")
        # Its hardware address outlives a boot: the others have it in their tables.
        card = "02:00:" + ":".join(f"{int(part):02x}" for part in machine.address.split("."))
        address = [f"link set dev eth0 address {card}", f"addr add {machine.address}/24 dev eth0"]
        own = ["link set dev lo up", *address, "link set dev eth0 up"]
        _no_ipv6(machine.init)
        _ip(*own, network_of=machine.init)
        self._fault(machine)

    def plug_out(self, machine: Machine) -> None:
        self._in_switch(f"link del dev {machine.name}")

    def _wire_host(self, prefix: int) -> None:
        _no_ipv6(self._switch.pid)
        _ip(f"link add name {self._plug} type veth peer name host netns {self._switch.pid}")
        bridge = ("link add name br0 type bridge", "link set dev br0 up")
        self._in_switch(*bridge, "link set dev host master br0", "link set dev host up")
        _ip(f"addr add {self.host}/{prefix} dev {self._plug}", f"link set dev {self._plug} up")

    def _in_switch(self, *lines: str) -> None:
        _ip(*lines, network_of=self._switch.pid)


def missing() -> str:
    """Which programs are not installed here, in words, or ""."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    need = "Debian: apt install iproute2 iptables openssh-server openssh-client util-linux"
    return f"machines as namespaces need {', '.join(absent)} ({need})" if absent else ""


def refused() -> str:
    """Why this machine lets us make none, or ""."""
    if os.geteuid() != 0:
        return "machines as namespaces can only be made by root"
    tried = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
    link = ["ip", "link", "add", "name", "left", "type", "veth", "peer", "name", "right"]
    ran = subprocess.run([*tried, *link], capture_output=True, text=True, check=False)
    return f"no machines as namespaces can be made here: {ran.stderr.strip()}" if ran.returncode else ""


def free_network() -> ipaddress.IPv4Network:
    """A /24 of 10.0.0.0/8 that overlaps with no network that this host has a route to."""
    rows = json.loads(subprocess.run(["ip", "-json", "-4", "route"], capture_output=True, check=True).stdout or "[]")
    taken = [ipaddress.ip_network(row["dst"]) for row in rows if row["dst"] != "default"]
    while True:
        found = ipaddress.ip_network(f"10.{random.randrange(64, 256)}.{random.randrange(256)}.0/24")
        if not any(found.overlaps(other) for other in taken):
            return found


def _shown() -> list[tuple[Path, bool]]:
    """What must be seen in every machine, read only: this tree and the Python that runs it."""
    found = {Path(path).resolve() for path in (ROOT, sys.prefix, sys.base_prefix)}
    return [(path, True) for path in sorted(found) if _is_hidden(path)]


def _is_hidden(path: Path) -> bool:
    from bed_machine import HIDDEN, HOME

    return any(path.is_relative_to(folder) for folder in (*HIDDEN, HOME))


def _in_own_network() -> "subprocess.Popen[bytes]":
    """A process that holds a network namespace until its standard input ends."""
    words = ["unshare", "--net", "sh", "-c", "echo ready; exec cat >/dev/null"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    return process


def _network_of(pid: int, *argv: str) -> list[str]:
    return ["nsenter", f"--target={pid}", "--net", "--", *argv]


def _ip(*lines: str, network_of: int = 0) -> None:
    """Lines for `ip`, done in order; CalledProcessError at the first that fails."""
    words = ["ip", "-batch", "-"]
    given = "".join(f"{line}\n" for line in lines).encode()
    command = _network_of(network_of, *words) if network_of else words
    subprocess.run(command, input=given, check=True, capture_output=True)


def _no_ipv6(pid: int) -> None:
    """Addresses that are made by themselves would pass the filters by."""
    off = "for f in all default; do echo 1 >/proc/sys/net/ipv6/conf/$f/disable_ipv6; done 2>/dev/null; true"
    subprocess.run(_network_of(pid, "sh", "-c", off), check=True)

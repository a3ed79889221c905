"""Three machines as network namespaces (tests/machines), with a fleet of ours on them or a bare Ray."""

import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "machines"))

from bed import Bed  # noqa: E402
from bed_machine import HOME, Machine  # noqa: E402
from bed_ssh import client_config, known_hosts  # noqa: E402
from their_ray import TheirRay, User  # noqa: E402

SSH = HOME / ".ssh"
STORE = HOME / "store"
PATIENCE_S = 180.0


def until(truth: Callable[[], Any], every_s: float = 0.05) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (seen := truth()):
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {PATIENCE_S:.0f} s in vain, last seen {seen!r}")
        time.sleep(every_s)
    return seen


def connect(bed: Bed) -> None:
    """m1 and m2 reach the others by `ssh NAME`."""
    keys = {name: machine.key for name, machine in bed.machines.items()}
    for machine in bed.machines.values():
        folder = machine.disk / ".ssh"
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / "known_hosts").write_text(known_hosts(keys, bed.addresses))
        (folder / "config").write_text(client_config(bed.addresses, SSH / "key", SSH / "known_hosts"))
        shutil.copy(bed.identity.file, folder / "key")
        (folder / "key").chmod(0o600)


class Fleet:
    """Head and pool `near` on m1; `pools` are the others: names of machines by pool."""

    def __init__(self, bed: Bed, **pools: tuple[str, ...]):
        self.bed, self.user = bed, User(bed.machines["m1"])
        self.m1, self.m2, self.m3 = bed.machines.values()
        common = {"backend": "cpu", "environment": {"interpreter": sys.executable}}
        hosts = {pool: [{"host": name, "address": bed.addresses[name]} for name in of] for pool, of in pools.items()}
        others = {pool: {**common, "hosts": rows, "storage": str(STORE)} for pool, rows in hosts.items()}
        fleet = {"name": "bench", "head": {"address": self.m1.address}, "pools": {"near": common, **others}}
        self._file = f"fleet-{'-'.join(pools)}.yaml"
        (self.m1.disk / self._file).write_text(json.dumps(fleet))  # JSON is YAML

    def up(self) -> None:
        self.user("up", "--file", str(HOME / self._file))

    def down(self) -> None:
        self.user("down")

    def job(self, command: str, **resources: Any) -> str:
        """Its file on m1."""
        asked = json.dumps({"task": "run", "command": command, "resources": resources})
        name = f"job-{hashlib.sha256(asked.encode()).hexdigest()[:12]}.yaml"
        (self.m1.disk / name).write_text(asked)
        return str(HOME / name)

    def ready(self) -> bool:
        """A node that was broken three times is quarantined; its user takes it back."""
        states = self.user.states()
        for node in (node for node, state in states.items() if state == "quarantined"):
            self.user("node", "resume", node)
        return set(states.values()) == {"ready"} and len(states) == 3


class BareRay:
    """`ray start` on each machine, side by side once the head is there, with a token and without TLS."""

    def __init__(self, bed: Bed):
        self._bed = bed
        self._ray: TheirRay | None = None

    def up(self) -> None:
        m1, *others = self._bed.machines.values()
        self._ray = TheirRay(self._bed, m1, "--num-cpus=2", f"--node-ip-address={m1.address}")
        begun = [self._ray.begin(m, "--num-cpus=2", f"--node-ip-address={m.address}") for m in others]
        for process, log in begun:
            until(lambda log=log, process=process: "Ray runtime started" in log.read_text() or process.poll())

    def down(self) -> None:
        if self._ray is not None:
            self._ray.close()  # every machine is switched off and on
            self._ray = None


def traffic(bed: Bed, seconds: float) -> list[dict[str, Any]]:
    """What each machine sent and received on its network meanwhile."""
    machines = bed.machines.values()
    before = {machine.name: _counted(machine) for machine in machines}
    time.sleep(seconds)
    found = []
    for machine in machines:
        more = {what: now - before[machine.name][what] for what, now in _counted(machine).items()}
        rates = {f"{what}_per_s": round(count / seconds, 1) for what, count in more.items()}
        found.append({"machine": machine.name, **rates})
    return found


def _counted(machine: Machine) -> Mapping[str, int]:
    """Of /proc/net/dev: bytes and packets received, then sent."""
    lines = Path(f"/proc/{machine.init}/net/dev").read_text().splitlines()
    words = next(line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:"))
    told = {"received_bytes": words[0], "received_packets": words[1], "sent_bytes": words[8], "sent_packets": words[9]}
    return {what: int(number) for what, number in told.items()}


@contextmanager
def a_bed(folder: Path) -> Iterator[Bed]:
    bed = Bed(folder)
    try:
        connect(bed)
        yield bed
    finally:
        bed.close()


def run(machine: Machine, *words: str, timeout_s: float = 300.0) -> "subprocess.CompletedProcess[str]":
    return machine.run(words, {"PYTHONPATH": str(ROOT)}, timeout_s=timeout_s)

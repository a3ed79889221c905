"""A fleet of three machines: up, gangs, copies from host to host, recovery, and what the network carries while idle.

    python benchmarks/machines.py [-o FILE] [--rounds 3] [--quick] [--only up gang copy recovery]

The machines are network namespaces of this one (tests/machines): their addresses, processes, homes and sshd are their
own, cores and disk are not. Needs root. Beside ours, in turn: bare `ray start` on each machine; `ssh` to two hosts;
`rsync`, `scp` and a bare TCP stream over the same link, shaped to 1 Gb/s. Environments and code are cached.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from shutil import which
from typing import Any

from parts import machine
from parts.samples import Samples, in_turn, ratio
from parts.three_machines import STORE, BareRay, Bed, Fleet, a_bed, run, traffic, until
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from orchestrator.units import duration

PARTS = ("up", "gang", "copy", "recovery")
LINK_BYTES_PER_S = 1e9 / 8
SETTLE_S = 5.0
WHATS = {
    "up": "`polyfleet up` of three machines, every node ready",
    "down": "`polyfleet down`",
    "ray": "`ray start` on each of three machines",
    "gang": "`polyfleet submit --wait` of a no-op on two hosts",
    "alone": "the same on one host",
    "ssh": "`ssh HOST true` on two hosts side by side",
    "copy": "`polyfleet checkpoint copy`, verified and durable",
    "rsync": "`rsync --whole-file --fsync`",
    "scp": "`scp`, then `sync`",
    "tcp": "a bare TCP stream, kept nowhere",
    "cut": "a job's host is cut off → it runs on another",
    "lost": "a job's host is switched off → it runs on another",
    "cut.back": "the cut heals → every node is ready",
    "lost.back": "the host boots again → every node is ready",
}
SAVE = """
import sys, torch
from workers.checkpoint import save
parts = range(int(sys.argv[2]))
save(sys.argv[1], 1, {"model": {str(n): torch.randint(256, (32 << 20,), dtype=torch.uint8) for n in parts}})
"""
RECEIVE = """
import socket
s = socket.create_server(("0.0.0.0", 9999)); print("ready", flush=True)
c, _ = s.accept(); b = bytearray(1 << 20); n = 0
while got := c.recv_into(b): n += got
c.sendall(b"done"); c.close()
"""
SEND = """
import pathlib, socket, sys
s = socket.create_connection((sys.argv[1], 9999))
for path in sorted(pathlib.Path(sys.argv[2]).rglob("*")):
    if path.is_file(): s.sendfile(path.open("rb"))
s.shutdown(socket.SHUT_WR); s.recv(4)
"""
BEATS = "while :; do echo $(hostname) $(date +%s.%N) >>{file}; sleep 0.1; done"
COPIES = ("copy", "tcp", "rsync", "scp")
COMPARED = (("up", "ray"), ("gang", "alone"), ("copy", "rsync"), ("copy", "scp"), ("copy", "tcp"))
console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, default=1024, help="of the checkpoint")
    parser.add_argument("--idle-s", type=float, default=20.0)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--quick", action="store_true", help="one round of everything, with a small checkpoint")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.mib, arguments.idle_s = 1, 64, 2.0
    before = machine.load()
    with tempfile.TemporaryDirectory(prefix="pf-bench-") as folder, a_bed(Path(folder)) as bed:
        measured = Bench(bed, arguments)
        try:
            measured.run()
        finally:
            measured.close()
        found = machine.circumstances(arguments, before, Path(folder)) | measured.found()
    show(found)
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")


class Bench:
    def __init__(self, bed: Bed, arguments: argparse.Namespace):
        self.bed, self.asked, self.samples = bed, arguments, Samples()
        self.fleet, self.ray = Fleet(bed, far=("m2", "m3")), BareRay(bed)
        self.idle: dict[str, list[dict[str, Any]]] = {}
        self.bytes = 0

    def close(self) -> None:
        self.bed.heal()
        with suppress(AssertionError):
            self.fleet.down()

    def run(self) -> None:
        self.fleet.up()  # code is on the hosts from here on
        self.fleet.down()
        if "up" in self.asked.only:
            in_turn([self._up, self._bare_ray], self.asked.rounds, console.log, "up")
        if {"gang", "recovery"} & {*self.asked.only}:
            self.fleet.up()
            self._idle("a fleet of ours")
            for part in (self.gang, self.recovery):
                if part.__name__ in self.asked.only:
                    part()
            self.fleet.down()
        if "copy" in self.asked.only:
            self.fleet = Fleet(self.bed, left=("m2",), right=("m3",))
            self.fleet.up()
            Copies(self.fleet, self).run()

    def _idle(self, what: str) -> None:
        if what not in self.idle:
            time.sleep(SETTLE_S)
            self.idle[what] = traffic(self.bed, self.asked.idle_s)

    def _up(self) -> None:
        with self.samples.timing("up"):
            self.fleet.up()
        with self.samples.timing("down"):
            self.fleet.down()

    def _bare_ray(self) -> None:
        try:
            with self.samples.timing("ray"):
                self.ray.up()
            self._idle("a bare Ray cluster")
        finally:
            self.ray.down()

    def gang(self) -> None:
        two, one = self.fleet.job("true", pool="far", nodes=2), self.fleet.job("true", pool="far")
        submit = partial(self.fleet.user, "submit", "--wait")
        ssh = partial(run, self.fleet.m1, "sh", "-ec", "ssh m2 true & ssh m3 true; wait $!")
        cases = {"gang": partial(submit, two), "alone": partial(submit, one), "ssh": ssh}
        for case in cases.values():
            case()
        in_turn([self.timed(what, do) for what, do in cases.items()], 2 * self.asked.rounds, console.log, "gang")

    def timed(self, what: str, do: Callable[[], Any]) -> Callable[[], None]:
        def timed() -> None:
            with self.samples.timing(what):
                do()

        return timed

    def recovery(self) -> None:
        in_turn([partial(self._recovery, what) for what in ("cut", "lost")], self.asked.rounds, console.log, "recovery")

    def _recovery(self, what: str) -> None:
        """All machines have one clock, and one folder."""
        until(self.fleet.ready, 0.5)
        beats = self.bed.shared / f"{what}-{time.monotonic_ns()}"
        job = self.fleet.user.told("submit", self.fleet.job(BEATS.format(file=beats), pool="far"))["id"]
        host = until(lambda: _beats(beats))[-1][0]
        begun_s = time.time()
        self.bed.cut(host) if what == "cut" else self.bed.machines[host].power_off()
        at_s = until(lambda: next((at_s for name, at_s in _beats(beats) if name != host), 0))
        self.samples.add(what, at_s - begun_s)
        self.fleet.user("cancel", job)
        healed_s = time.time()
        self.bed.heal() if what == "cut" else self.bed.machines[host].boot()
        until(self.fleet.ready, 0.5)
        self.samples.add(f"{what}.back", time.time() - healed_s)

    def found(self) -> dict[str, Any]:
        rows = {what: {"what": text, **self.samples.row(what)} for what, text in WHATS.items() if what in self.samples}
        for what in COPIES:
            if what in rows:
                rows[what]["of_link"] = self.bytes / rows[what]["median_s"] / LINK_BYTES_PER_S
        ratios = [ratio(rows[ours], rows[theirs]) for ours, theirs in COMPARED if {ours, theirs} <= rows.keys()]
        absent = [name for name in ("rsync", "scp") if which(name) is None]
        told = {"checkpoint_bytes": self.bytes, "idle": self.idle, "not_installed": absent}
        return {"rows": list(rows.values()), "ratios": ratios, **told}


class Copies:
    """Of one checkpoint from m2 to m3, each time to where nothing is."""

    def __init__(self, fleet: Fleet, bench: Bench):
        self.fleet, self.bench, self.asked = fleet, bench, bench.asked
        self.number = count()

    def run(self) -> None:
        run(self.fleet.m2, sys.executable, "-c", SAVE, f"{STORE}/big", str(max(self.asked.mib // 32, 1)))
        [step] = (self.fleet.m2.disk / "store" / "big").glob("step-*")
        self.bench.bytes = sum(path.stat().st_size for path in step.rglob("*") if path.is_file())
        self.fleet.bed.rate("1gbit", "m2", "m3")
        source, target = f"{STORE}/big/{step.name}", f"m3:{STORE}/other"
        scp = f"scp -qr {source} {target}; ssh m3 sync {STORE}/other/*/*"
        rsync = ["rsync", "-a", "--whole-file", "--fsync", source, target]
        ways: dict[str, Callable[[], Any]] = {
            "copy": self._copy,
            "tcp": partial(self._stream, source),
            "rsync": partial(run, self.fleet.m2, *rsync),
            "scp": partial(run, self.fleet.m2, "sh", "-ec", scp),
        }
        cases = [partial(self._each, what, do) for what, do in ways.items() if which(what) or what in ("copy", "tcp")]
        in_turn(cases, self.asked.rounds, console.log, "copy")
        self.fleet.bed.heal()

    def _each(self, what: str, do: Callable[[], Any]) -> None:
        run(self.fleet.m3, "sh", "-ec", f"rm -rf {STORE}/other {STORE}/copy-*; mkdir -p {STORE}/other; sync")
        self.bench.timed(what, do)()

    def _copy(self) -> None:
        told = self.fleet.user("checkpoint", "copy", "left:big", f"right:copy-{next(self.number)}", "-o", "json")
        if json.loads(told.stdout)["transferred_bytes"] < 0.99 * self.bench.bytes:
            raise SystemExit(f"not all of it transferred: {told.stdout}")

    def _stream(self, source: str) -> None:
        receiver = self.fleet.m3.popen([sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE)
        assert receiver.stdout is not None and receiver.stdout.readline() == "ready\n"
        run(self.fleet.m2, sys.executable, "-c", SEND, self.fleet.m3.address, source)
        receiver.communicate()


def _beats(file: Path) -> list[tuple[str, float]]:
    """Where the job was, and when."""
    words = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    return [(found[0], float(found[1])) for found in words if len(found) == 2]


def show(found: dict[str, Any]) -> None:
    table = Table(box=MARKDOWN)
    for column in ("what", "median", "range or interval", "n", "of the link"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in found["rows"]:
        interval = f"{duration(row['low_s'])} – {duration(row['high_s'])}"
        share = f"{row['of_link']:.0%}" if "of_link" in row else ""
        table.add_row(row["what"], duration(row["median_s"]), interval, str(row["n"]), share)
    console.print(table)
    idle = Table(box=MARKDOWN)
    for column in ("idle", "machine", "received", "sent", "packets"):
        idle.add_column(column, justify="left" if column in ("idle", "machine") else "right")
    for what, rows in found["idle"].items():
        for row in rows:
            packets = row["received_packets_per_s"] + row["sent_packets_per_s"]
            received, sent = (f"{row[f'{name}_bytes_per_s'] / 1e3:.1f} kB/s" for name in ("received", "sent"))
            idle.add_row(what, row["machine"], received, sent, f"{packets:.0f}/s")
    console.print(idle)
    for one in found["ratios"]:
        low, high = f"{one['low']:.2g}", f"{one['high']:.2g}"
        console.print(f"{one['theirs']} over {one['ours']}: {one['ratio']:.2g} ({low} – {high}), {one['verdict']}")
    console.print(f"load {found['load_average']}, not installed: {found['not_installed'] or 'nothing'}")


if __name__ == "__main__":
    main()

"""The machines themselves: what each has of its own, and that each fault does what it says, and heals."""

import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from bed import Bed, free_network
from bed_machine import HOME, Machine, reach
from bed_wire import Faults, filters
from their_ray import wait

pytestmark = pytest.mark.full

RECEIVE = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, 33, 1 << 24)  # SO_RCVBUFFORCE: none is dropped here, however late we are
s.bind((sys.argv[1], 7007)); s.settimeout(60)
print("ready", flush=True)
seen = set()
while (data := s.recv(16)) != b"end":
    seen.add(data)
print(len(seen))
"""
SEND = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for number in range(400):
    s.sendto(str(number).encode(), (sys.argv[1], 7007))
for _ in range(50):
    s.sendto(b"end", (sys.argv[1], 7007))
"""
FETCH = """
import socket, sys
s = socket.create_connection((sys.argv[1], 7008))
size = 0
while data := s.recv(1 << 16):
    size += len(data)
print(size)
"""
SERVE = """
import socket, sys
s = socket.create_server((sys.argv[1], 7008))
print("ready", flush=True)
c, _ = s.accept()
c.sendall(bytes(int(sys.argv[2])))
c.close()
"""


def python(machine: Machine, code: str, *words: str) -> str:
    return machine.run([sys.executable, "-I", "-S", "-c", code, *words]).stdout.strip()


def begun(machine: Machine, code: str, *words: str) -> "subprocess.Popen[str]":
    program = machine.popen([sys.executable, "-I", "-S", "-c", code, *words], stdout=subprocess.PIPE)
    assert program.stdout is not None and program.stdout.readline() == "ready\n"
    return program


def said(program: "subprocess.Popen[str]") -> str:
    return program.communicate()[0].strip()


def sees(bed: Bed) -> dict[str, str]:
    """By machine, whom it reaches."""
    pairs = [(a, b) for a in bed.machines.values() for b in bed.machines.values() if a is not b]
    with ThreadPoolExecutor(len(pairs)) as threads:
        reached = threads.map(lambda pair: pair[0].reaches(pair[1].address), pairs)
        found = [pair for pair, there in zip(pairs, reached, strict=True) if there]
    return {name: " ".join(b.name for a, b in found if a.name == name) for name in bed.machines}


ALL = {"m1": "m2 m3", "m2": "m1 m3", "m3": "m1 m2"}


def test_each_machine_has_its_own_name_address_home_processes_and_temporary_files(bed: Bed):
    m1, m2, _ = bed.machines.values()
    assert [m.run(["hostname"]).stdout.strip() for m in bed.machines.values()] == list(bed.machines)
    assert len({m.run(["cat", "/proc/sys/kernel/random/boot_id"]).stdout for m in bed.machines.values()}) == 3
    assert m1.run(["sh", "-c", "touch mine /tmp/mine /run/mine; echo $HOME; pwd"]).stdout.split() == [str(HOME)] * 2
    assert (m1.disk / "mine").exists() and not (m2.disk / "mine").exists()
    assert not any(m2.inside(f"{folder}/mine").exists() for folder in ("/tmp", "/run"))
    pids = python(m1, "import os; print(*(p for p in os.listdir('/proc') if p.isdecimal()))").split()
    assert "1" in pids and len(pids) < 10 and len(list(psutil.process_iter())) > len(pids)
    (bed.shared / "ours").write_text("seen by all")
    assert m2.run(["cat", str(bed.shared / "ours")]).stdout == "seen by all"


def test_machines_and_this_host_reach_each_other_by_name(bed: Bed):
    assert sees(bed) == ALL
    assert bed.machines["m1"].reaches("m3") and reach(bed.addresses["m2"])
    here = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True, check=True).stdout
    assert f" {bed.host}/24 " in here


def test_ssh_logs_in_where_the_host_key_is_known_and_nowhere_else(bed: Bed):
    assert bed.ssh("m1", "hostname; pwd").stdout.split() == ["m1", str(HOME)]
    assert bed.ssh(bed.addresses["m2"], "hostname").stdout == "m2\n"
    nobodys = bed.client_config("nobodys", identity=bed.stranger.file)
    assert "Permission denied" in bed.ssh("m1", "true", nobodys).stderr
    unknown = bed.client_config("unknown", known=False)
    assert "Host key verification failed" in bed.ssh("m1", "true", unknown).stderr
    bed.machines["m1"].change_host_key()
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in bed.ssh("m1", "true").stderr
    bed.heal()
    assert bed.ssh("m1", "true").returncode == 0


def test_a_machine_that_loses_its_power_tells_nobody_and_comes_back_with_its_files(bed: Bed):
    m1, m2, _ = bed.machines.values()
    program = begun(m2, SERVE, m2.address, "1")
    (m2.disk / "kept").write_text("old")
    m2.run(["touch", "/tmp/gone"])
    before = m2.run(["cat", "/proc/sys/kernel/random/boot_id"]).stdout
    m2.power_off()
    assert said(program) == "" and not m1.reaches(m2.address) and not m2.is_up
    m2.boot()
    assert m1.reaches(m2.address) and bed.ssh("m2", "cat kept").stdout == "old"
    assert m2.run(["cat", "/proc/sys/kernel/random/boot_id"]).stdout != before
    assert not m2.inside("/tmp/gone").exists() and not m1.reaches(m2.address, 7008)


def test_a_cut_keeps_packets_out_both_ways_or_one_way_and_survives_a_boot(bed: Bed):
    bed.cut("m1", "m2")
    assert sees(bed) == {"m1": "m3", "m2": "m3", "m3": "m1 m2"}
    bed.machines["m2"].power_off()
    bed.machines["m2"].boot()
    assert sees(bed)["m2"] == "m3"
    bed.heal()
    assert sees(bed) == ALL
    bed.cut("m3")
    assert sees(bed) == {"m1": "m2", "m2": "m1", "m3": ""} and not reach(bed.addresses["m3"])
    bed.heal()
    receiver = begun(bed.machines["m2"], RECEIVE, bed.addresses["m2"])
    bed.cut("m2", "m1", one_way=True)
    python(bed.machines["m1"], SEND, bed.addresses["m2"])
    assert said(receiver) == "400" and not bed.machines["m1"].reaches(bed.addresses["m2"])


def test_a_cut_one_way_is_a_rule_where_packets_arrive():
    addresses = {"m1": "10.0.0.1", "m2": "10.0.0.2", "host": "10.0.0.254"}

    def rules(name: str, *cuts: tuple[str, str]) -> list[str]:
        lines = filters(name, Faults(cuts=set(cuts)), addresses).splitlines()
        return [line for line in lines if line.startswith("-A")]

    assert rules("m1", ("m1", "m2")) == []
    assert rules("m2", ("m1", "m2")) == ["-A INPUT ! -i lo -s 10.0.0.1 -j DROP"]
    assert rules("m1", ("m1", "host")) == ["-A OUTPUT -d 10.0.0.254 -j DROP"]
    assert rules("m1", ("host", "m1")) == ["-A INPUT ! -i lo -s 10.0.0.254 -j DROP"]
    assert rules("m2", ("*", "m2")) == ["-A INPUT ! -i lo -j DROP"]
    assert rules("m1", ("*", "m2")) == []


def test_lost_packets_are_a_share_of_all(bed: Bed):
    bed.loss(0.5, "m2")
    receiver = begun(bed.machines["m2"], RECEIVE, bed.addresses["m2"])
    python(bed.machines["m1"], SEND, bed.addresses["m2"])
    assert 100 < int(said(receiver)) < 300
    bed.heal()
    receiver = begun(bed.machines["m2"], RECEIVE, bed.addresses["m2"])
    python(bed.machines["m1"], SEND, bed.addresses["m2"])
    assert said(receiver) == "400"


def fetch_s(bed: Bed, size_bytes: int) -> float:
    server = begun(bed.machines["m1"], SERVE, bed.addresses["m1"], str(size_bytes))
    begun_s = time.monotonic()
    assert python(bed.machines["m3"], FETCH, bed.addresses["m1"]) == str(size_bytes)
    took_s = time.monotonic() - begun_s
    said(server)
    return took_s


def test_a_slow_wire_and_a_long_one_take_their_time(bed: Bed):
    """Only what no busy machine can make shorter is looked at."""
    bed.rate("8mbit", "m3")
    assert fetch_s(bed, 500_000) > 0.4  # a million bytes a second, and the first 16 kB at once
    bed.heal()
    bed.delay(0.1, "m3")
    assert fetch_s(bed, 1) > 0.4  # two round trips
    bed.heal()
    assert fetch_s(bed, 5_000_000) > 0


def test_a_full_disk_takes_nothing_more(bed: Bed):
    m3 = bed.machines["m3"]
    (m3.disk / "old").write_text("here")
    m3.fill_disk()
    assert "No space left" in m3.run(["sh", "-c", "cat old; dd if=/dev/zero of=new bs=1M count=1"], check=False).stderr
    assert shutil.disk_usage(m3.inside(HOME)).free == 0
    bed.heal()
    m3.run(["sh", "-c", "cat old && dd if=/dev/zero of=new bs=1M count=1 status=none && rm new"])


def test_without_sshd_and_without_python(bed: Bed):
    m2 = bed.machines["m2"]
    m2.stop_sshd()
    assert "Connection refused" in bed.ssh("m2", "true").stderr
    m2.hide_python()
    assert m2.run(["sh", "-c", "command -v python3 || echo none"]).stdout == "none\n"
    assert m2.run([sys.executable, "-c", ""], check=False).returncode != 0
    bed.heal()
    assert bed.ssh("m2", f"{shlex.quote(sys.executable)} -I -S -c 'print(1)'").stdout == "1\n"


def test_the_network_is_none_that_this_host_knows():
    network = free_network()
    routes = subprocess.run(["ip", "-4", "route"], capture_output=True, text=True, check=True).stdout
    assert str(network) not in routes and network.is_private


MAKES_ONE = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from bed import Bed
bed = Bed(Path(sys.argv[2]), ["m1"])
print(bed._plug, bed.machines["m1"].init, flush=True)
time.sleep(600)
"""


@pytest.mark.usefixtures("shared_bed")
def test_nothing_is_left_of_machines_whose_maker_is_killed(tmp_path: Path):
    words = [sys.executable, "-c", MAKES_ONE, str(Path(__file__).parent), str(tmp_path)]
    maker = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    plug, init = maker.stdout.readline().split()
    assert Path(f"/sys/class/net/{plug}").exists() and psutil.pid_exists(int(init))
    maker.kill()
    maker.communicate()
    wait(lambda: not Path(f"/sys/class/net/{plug}").exists() and not psutil.pid_exists(int(init)))

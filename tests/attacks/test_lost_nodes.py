"""A real fleet of one node beside another user: closed under every umask, also the parts that are started again."""

import os
import socket
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from live_folders import list_files
from patience import wait_for

from cluster import paths
from cluster.fleet import fleet_record
from cluster.fleet.fleet_record import FleetRecord
from cluster.fleet.fleet_spec import FleetSpec, parse_fleet
from cluster.nodes import embedded
from cluster.nodes.node_repair import HEAD, NodeRepair
from cluster.nodes.raylets import wait_until_started

pytestmark = pytest.mark.full

ORDERED = True  # the last test ends the fleet of all
HERE = {"backend": "cpu", "environment": {"interpreter": "current"}}
PATIENCE_S = 180.0


@pytest.fixture(scope="module")
def fleet(open_place: Path) -> Iterator[FleetSpec]:
    set_before = {name: os.environ.get(name) for name in ("POLYFLEET_HOME", "POLYFLEET_CACHE")}
    os.environ |= {"POLYFLEET_HOME": str(open_place / "home"), "POLYFLEET_CACHE": str(open_place / "cache")}
    spec = parse_fleet({"name": "alone", "pools": {"cpu": HERE}})
    umask = os.umask(0o000)
    try:
        embedded.up(spec, print)
        yield spec
    finally:
        os.umask(umask)
        embedded.down(print)
        for name, value in set_before.items():
            os.environ.pop(name)
            os.environ |= {name: value} if value is not None else {}


def current() -> FleetRecord:
    found = fleet_record.read()
    assert found is not None
    return found


wait = partial(wait_for, limit_s=PATIENCE_S)


def child(node: str, name: str) -> psutil.Process:
    [start] = [p for p in current().processes if p.node == node]
    return next(c for c in psutil.Process(start.pid).children() if c.name() == name)


def everything() -> dict[Path, os.stat_result]:
    """What the fleet has made: Ray's folder, our home, the code."""
    return dict(list_files(Path(current().temp_dir), paths.home(), paths.cache()))


def entered(found: list[str]) -> list[str]:
    """Which of these paths this process can list, read, write, rename or connect to."""
    tries: list[Callable[[Path], object]] = [os.listdir, Path.read_bytes, lambda p: p.open("ab").close(), connect]
    tries.append(lambda p: p.rename(p.with_name("renamed")))
    done = []
    for path in map(Path, found):
        for act in tries:
            try:
                act(path)
                done.append(str(path))
            except OSError:
                continue
    return done


def connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(str(path))


def assert_closed(nobody) -> None:
    """Every root of ours keeps others out; what we make ourselves is 0600 and 0700 all the way down."""
    found = everything()
    assert sum(stat.S_ISSOCK(status.st_mode) for status in found.values()) >= 4
    assert {status.st_uid for status in found.values()} == {os.geteuid()}
    open_to_others = [
        path
        for path, status in found.items()
        if stat.S_IMODE(status.st_mode) & 0o077
        and not stat.S_ISLNK(status.st_mode)
        and (stat.S_ISREG(status.st_mode) or not path.is_relative_to(current().ray_dir))
    ]
    assert open_to_others == []
    assert nobody.does(lambda: entered([str(path) for path in found])) == []


def listeners() -> set[str]:
    """Addresses on which Ray's processes of this fleet listen."""
    found = set()
    for node in current().processes:
        start = psutil.Process(node.pid)
        for process in (start, *start.children(recursive=True)):
            found |= {c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    return found


def test_a_fleet_brought_up_without_a_umask_is_closed(fleet: FleetSpec, nobody):
    assert_closed(nobody)
    raylet = child("cpu-0", "raylet")
    assert "Umask:\t0077" in Path(f"/proc/{raylet.pid}/status").read_text()
    assert raylet.environ()["POLYFLEET_UMASK"] == "002"  # for jobs; what everybody may change is nobody's wish
    assert {address.removeprefix("::ffff:") for address in listeners()} == {"127.0.0.1"}


def test_a_killed_node_is_started_again_alone_and_closed(fleet: FleetSpec, nobody):
    before, repairs = current(), NodeRepair(print)
    os.umask(0o022)
    child("cpu-0", "raylet").kill()
    wait(lambda: repairs.restart_lost_nodes().started == ("cpu-0",))
    [node] = [p for p in current().processes if p.node == "cpu-0"]
    wait_until_started(node)
    assert current().address == before.address and current().processes[0] == before.processes[0]
    assert current().umask == 0o000
    assert_closed(nobody)


def test_a_fleet_whose_state_server_is_killed_gets_it_back_with_its_state_and_stays_closed(fleet: FleetSpec, nobody):
    before, repairs = current(), NodeRepair(print)
    os.umask(0o077)
    child(HEAD, "gcs_server").kill()
    wait(lambda: repairs.restart_lost_nodes().started == (HEAD,))
    now = current()
    assert now.state == "up" and now.address == before.address and now.temp_dir == before.temp_dir
    assert {p.node for p in now.running()} == {HEAD, "cpu-0"}
    assert_closed(nobody)
    assert embedded.up(fleet, print).processes == now.processes


def test_down_ends_what_a_killed_parent_left_and_spares_who_reads_its_logs(fleet: FleetSpec, shell):
    """Last in this file. Processes that Ray gave another title have no arguments: their folder tells them."""
    folder = Path(current().temp_dir)
    left = [p for p in psutil.process_iter(["cwd"]) if Path(p.info["cwd"] or "/").is_relative_to(folder)]
    assert len(left) >= 6
    reader = shell(["tail", "-s", f"{folder}/r/session_latest/logs/raylet.out"])
    for node in current().processes:
        psutil.Process(node.pid).kill()
    wait(lambda: not current().running())
    assert embedded.down(print) == []
    wait(lambda: not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE])
    assert reader.poll() is None
    assert not folder.exists()

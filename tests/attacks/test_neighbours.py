"""Another user of the same machine: nothing of ours is read, exchanged or mistaken, nothing of theirs is touched."""

import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import paths
from cluster.environments import code_export
from cluster.environments.environment_spec import EnvironmentSpec
from cluster.errors import UserError
from cluster.fleet import fleet_record
from cluster.fleet.fleet_record import FleetRecord
from cluster.fleet.fleet_spec import PoolSpec, parse_fleet
from cluster.host.processes import is_alive
from cluster.nodes import raylets
from cluster.nodes.embedded import down
from orchestrator.home import daemon
from workers.node.agent import Agent
from workers.storage.pool_storage import PoolStorage

HERE = EnvironmentSpec(interpreter="current")
MASKS = [0o000, 0o022, 0o077]


@pytest.fixture
def place(open_place: Path) -> Path:
    """A new folder of its own in one that every user can pass."""
    folder = Path(tempfile.mkdtemp(dir=open_place))
    folder.chmod(0o755)
    return folder


@pytest.fixture
def home(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POLYFLEET_HOME", str(place / "home"))
    monkeypatch.setenv("POLYFLEET_CACHE", str(place / "cache"))
    return place / "home"


@pytest.fixture(params=MASKS, ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def below(folder: Path) -> list[Path]:
    return [folder, *folder.rglob("*")]


# -- folders


def test_what_is_made_is_closed_whatever_the_umask(umask: int, place: Path):
    made = paths.private_dir(place / "a" / "b")
    assert [mode(made), mode(made.parent), mode(place)] == [0o700, 0o700, 0o755]
    paths.write_private(made / "text", "x")
    with paths.open_private(made / "lock"):
        assert {mode(file) for file in made.iterdir()} == {0o600}


def test_an_open_home_of_ours_is_closed_and_with_it_what_lies_in_it(home: Path):
    (home / "logs").mkdir(parents=True, mode=0o755)
    (home / "server.lock").touch()
    assert mode(home) == 0o755
    assert paths.private_dir(home / "logs").is_dir()
    assert mode(home) == 0o700


def test_an_open_folder_that_is_not_ours_is_refused_and_not_closed(place: Path):
    (place / "somebody's").touch()
    with pytest.raises(UserError, match=r"open to other users \(mode 0755\).*; name a folder of its own, .*polyfleet"):
        paths.private_dir(place)
    assert mode(place) == 0o755


def test_a_home_of_another_user_is_refused(home: Path, nobody):
    home.mkdir()
    os.chown(home, nobody.uid, nobody.uid)
    with pytest.raises(UserError, match=rf"{home} belongs to user {nobody.uid}, this process runs as user 0"):
        daemon.start_server(home)
    for ask in (fleet_record.read, lambda: daemon.find_server(home), lambda: down(print)):
        with pytest.raises(UserError, match="belongs to user"):
            ask()


@pytest.mark.parametrize("folder", ["/", "/tmp", "/etc"])
def test_a_system_folder_is_never_closed(folder: str, nobody):
    """By a user without the right to, as this is tried on a real machine."""

    def asked() -> list[str]:
        said = []
        for ask in (paths.private_dir, paths.storage_dir, PoolStorage):
            try:
                ask(Path(folder))
            except UserError as e:
                said.append(e.message)
        return said

    before = mode(Path(folder))
    assert len(nobody.does(asked)) == 3
    assert mode(Path(folder)) == before


def test_a_storage_that_a_pool_names_keeps_its_mode(place: Path, home: Path):
    named = place / "checkpoints"
    named.mkdir(mode=0o755)
    named.chmod(0o2775)
    raylets.make_storage("cpu", PoolSpec(backend="cpu", environment=HERE, storage=str(named)))
    PoolStorage(named)
    assert mode(named) == 0o2775
    new = raylets.make_storage("cpu", PoolSpec(backend="cpu", environment=HERE, storage=str(place / "new")))
    assert mode(new) == 0o700


def test_a_storage_in_which_any_user_can_put_a_checkpoint_is_refused(place: Path):
    shared = place / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    with pytest.raises(UserError, match=r"any user of this machine can put a checkpoint.*; name a folder in it"):
        paths.storage_dir(shared)


def test_jobs_write_under_the_umask_of_who_brought_the_fleet_up(umask: int, place: Path, monkeypatch):
    """Ray's processes have a stricter one; an agent and what it starts have the one it is told."""
    monkeypatch.setenv("POLYFLEET_UMASK", "027")
    Agent(place / "node", place / "storage", "cpu-0", "cpu", "cpu")
    assert paths.umask() == 0o027


def test_what_a_server_makes_is_closed_whatever_the_umask(umask: int, home: Path):
    daemon.start_server(home)
    try:
        found = below(home)
        assert {"token", "server.json", "server.log"} <= {path.name for path in found}
        assert [f"{path} {mode(path):o}" for path in found if mode(path) & 0o077] == []
    finally:
        daemon.stop_server(home)


# -- the code that nodes run


def test_exported_code_is_closed_whatever_the_umask(umask: int, home: Path):
    folder = code_export.export()
    assert {mode(path) for path in (paths.cache(), folder.parent, *below(folder))} == {0o700, 0o600}


def planted_top_level(folder: Path) -> Path:
    return folder / "torch.py"


def planted_beside(folder: Path) -> Path:
    return folder / "workers" / "json.py"


def planted_without_source(folder: Path) -> Path:
    return folder / "workers" / "extra.pyc"


@pytest.mark.parametrize("where", [planted_top_level, planted_beside, planted_without_source])
def test_code_with_a_file_more_is_replaced(where, home: Path):
    where(code_export.export()).write_bytes(b"print('planted')\n")
    assert not where(code_export.export()).exists()


def test_compiled_code_of_another_user_is_replaced(home: Path, nobody):
    kept = code_export.export() / "workers" / "__pycache__"
    kept.mkdir(mode=0o700)
    planted = kept / f"agent.{sys.implementation.cache_tag}.pyc"
    planted.write_bytes(b"x")
    os.chown(planted, nobody.uid, nobody.uid)
    code_export.export()
    assert not planted.exists()


def test_code_that_others_could_have_changed_is_replaced(home: Path):
    folder = code_export.export()
    before = (folder / "workers").stat().st_ino
    (folder / "workers").chmod(0o777)
    assert code_export.export() == folder
    assert (folder / "workers").stat().st_ino != before and mode(folder / "workers") == 0o700


def test_a_code_folder_of_another_user_is_refused(home: Path, nobody):
    folder = paths.private_dir(paths.cache() / "code")
    os.chown(folder, nobody.uid, nobody.uid)
    with pytest.raises(UserError, match=rf"code belongs to user {nobody.uid}; set POLYFLEET_CACHE"):
        code_export.export()


# -- processes that only look like ours


def lives(shell) -> bool:
    return shell.poll() is None and shell.communicate("echo lives\n")[0] == "lives\n"


def served(home: Path) -> list[str]:
    return ["python3", "-s", "-m", "orchestrator.server", "--home", str(home), "--port", "0"]


def test_another_user_who_names_our_home_blocks_no_server_and_is_not_stopped(home: Path, nobody, shell):
    """Its command line is that of a server of this home, letter by letter."""
    neighbour = shell(served(home), nobody.uid)
    server = daemon.start_server(home)
    assert daemon.stop_server(home) is True
    assert not is_alive(server.process) and lives(neighbour)


def test_our_own_process_that_names_our_home_blocks_no_server_and_is_not_stopped(home: Path, shell):
    reader = shell(["sh", "-s", "orchestrator.server", "--home", str(home)])
    assert daemon.stop_server(home) is False
    assert lives(reader)


def stale_record(temp_dir: Path) -> FleetRecord:
    temp_dir.mkdir(mode=0o700)
    return FleetRecord("f", "up", "127.0.0.1:1", "0", 1.0, "/token", temp_dir=str(temp_dir))


def test_down_spares_our_own_process_that_names_the_fleets_folder_or_works_there(home: Path, place: Path, shell):
    record = stale_record(place / "pf-12345678")
    reader = shell(["tail", "-s", f"{record.temp_dir}/r/session_latest/logs/raylet.out"])
    working = shell(["less", "-s"], cwd=Path(record.temp_dir))
    fleet_record.write(record)
    assert down(print) == []
    assert lives(reader) and lives(working)
    assert not Path(record.temp_dir).exists()


def test_down_spares_another_user_who_looks_like_ray(home: Path, place: Path, nobody, shell):
    record = stale_record(place / "pf-12345678")
    ray = "/usr/lib/python3/site-packages/ray/core/src/ray/raylet/raylet"
    Path(record.temp_dir).chmod(0o755)
    words = [ray, "-s", "x", f"--raylet_socket_name={record.temp_dir}/r/cpu-0.raylet"]
    same = shell(words, nobody.uid, cwd=Path(record.temp_dir))
    fleet_record.write(record)
    assert down(print) == []
    assert lives(same)


def test_down_works_beside_processes_that_are_not_ours_to_look_at(place: Path, nobody, shell, monkeypatch):
    """A user without rights stops a fleet while root's process names its folder."""
    theirs = place / "theirs"
    theirs.mkdir()
    os.chown(theirs, nobody.uid, nobody.uid)
    monkeypatch.setenv("POLYFLEET_HOME", str(theirs / "home"))

    def taken_down() -> list[str]:
        fleet_record.write(stale_record(theirs / "pf-12345678"))
        return down(lambda said: None)

    roots = shell(["tail", "-s", str(theirs / "pf-12345678")])
    assert nobody.does(taken_down) == []
    assert lives(roots)


def test_a_temporary_folder_that_has_become_a_link_is_not_followed(home: Path, place: Path):
    record = stale_record(place / "pf-12345678")
    Path(record.temp_dir).rmdir()
    (place / "other").mkdir()
    (place / "other" / "file").touch()
    Path(record.temp_dir).symlink_to(place / "other")
    fleet_record.write(record)
    down(print)
    assert (place / "other" / "file").exists()


def test_a_fleet_that_names_a_shared_folder_as_storage_does_not_begin(home: Path, place: Path):
    from cluster.nodes import embedded

    shared = place / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    pool = {"backend": "cpu", "environment": {"interpreter": "current"}, "storage": str(shared)}
    with pytest.raises(UserError, match=r"pools\.cpu\.storage: in .*shared any user"):
        embedded.up(parse_fleet({"pools": {"cpu": pool}}), print)
    assert mode(shared) == 0o1777
    assert fleet_record.read() is None

"""What holds for every process that a test starts."""

import getpass
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

# Importing torch-xla or IPEX starts a pool of compilers, each of which imports torch, waited for when the process ends:
# six CPU seconds a process, and the suite starts a hundred. Ranks of those back ends are started without it too.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# A call of Ray's that finds no cluster would start one in the process of the tests, which ends with that cluster.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
# What inductor keeps of a compiled program does not tell what ATEN_CPU_CAPABILITY allowed when it was made: a process
# that may use less takes code it cannot build (torch 2.13). Each has a folder of its own.
if "ATEN_CPU_CAPABILITY" in os.environ:
    kept = Path(tempfile.gettempdir()) / f"inductor-{getpass.getuser()}-{os.environ['ATEN_CPU_CAPABILITY']}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kept))
# Two files of tests run at a time: torch's threads that wait for each other sleep soon, and leave the CPU to others.
# No default for ranks: alone, a small training step takes 1.3 times as long with it (2 cores, median of 7 pairs).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

sys.path.insert(0, str(Path(__file__).parent))  # helpers of all tests; nothing else is called like them

from run_report import report_run
from terminals import Terminal

TOY = Path(__file__).parent / "data" / "toy-vendor"


def pytest_configure(config: pytest.Config) -> None:
    """Triton's kernels are interpreted on the CPU, unless tests of a GPU are asked for (`-m gpu`). Triton settles that
    for a whole process when it is first imported, as torch.compile may do in any test; its code is the same either way.
    """
    if "gpu" not in config.option.markexpr:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    report_run(config)
    settle_hypothesis()


def settle_hypothesis() -> None:
    """No example has a limit of time: machines differ. In CI the examples of a property are the same in every run."""
    try:
        from hypothesis import HealthCheck, settings
    except ImportError:  # the second environment and machines with a GPU do without
        return
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    settings.register_profile("new examples", deadline=None, suppress_health_check=slow)
    settings.register_profile("same examples", settings.get_profile("new examples"), derandomize=True, database=None)
    settings.load_profile("same examples" if "CI" in os.environ else "new examples")


@pytest.fixture(scope="session")
def toy_vendor():
    """`toy_vendor(folder)` puts a distribution with a vendor of its own there, as pip would; see data/toy-vendor."""

    def install(folder: Path) -> Path:
        shutil.copytree(TOY / "toy_vendor", folder / "toy_vendor")
        (folder / "toy_vendor" / "__init__.py").touch()  # not in the tree: a package there would hide others
        metadata = folder / "toy_vendor-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-vendor\nVersion: 1.0\n")
        shutil.copy(TOY / "entry_points.txt", metadata)
        return folder

    return install


@pytest.fixture
def at_a_terminal() -> Iterator[Callable[..., Terminal]]:
    """Start a command at a terminal of its own; what still runs ends with the test."""
    begun: list[Terminal] = []

    def start(*given: Any) -> Terminal:
        begun.append(Terminal(*given))
        return begun[-1]

    yield start
    for terminal in begun:
        terminal.close()


@pytest.fixture(scope="session")
def rayless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `python` of an environment with all packages of this one but Ray, as a vendor's image may have it."""
    folder = tmp_path_factory.mktemp("rayless")
    venv.create(folder, symlinks=True)
    packages = folder / "packages"
    packages.mkdir()
    for found in Path(sysconfig.get_path("purelib")).iterdir():
        if not found.name.startswith(("ray", "__pycache__")) and found.suffix != ".pth":
            (packages / found.name).symlink_to(found)
    [site] = folder.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(f"{packages}\n")
    return folder / "bin" / "python"


@pytest.fixture(scope="session")
def absent() -> Callable[[str, str], None]:
    """`absent("strace", why)`: what a test needs cannot be used here. It is skipped, unless POLYFLEET_TESTS_NEED names
    that: then it fails. A check that installs a program must not pass without its tests.
    """

    def told(name: str, why: str) -> None:
        if name in os.environ.get("POLYFLEET_TESTS_NEED", "").split():
            pytest.fail(f"{why}; POLYFLEET_TESTS_NEED says that this machine has {name}", pytrace=False)
        pytest.skip(why)

    return told


@pytest.fixture
def needs_native():
    """`needs_native("bfloat16")` skips a test where this process's CPU, or the device named, has no units for it."""

    def need(dtype, name="cpu"):
        from workers import backends

        backend = backends.create(name)
        if not backend.supports_dtype(dtype):
            pytest.skip(f"{backend.kind} has no native {dtype} here")

    return need


NOBODY = 65534


class SecondUser:
    """Another user of this machine, without rights of ours."""

    uid = NOBODY

    def does(self, act: Callable[[], Any]) -> Any:
        """What `act` returns, as JSON has it, when that user calls it; or the name of the error it raises."""
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            try:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                said = act()
            except BaseException as e:
                said = type(e).__name__
            os.write(writing, json.dumps(said).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as f:
            said = f.read()
        os.waitpid(child, 0)
        return json.loads(said)


@pytest.fixture
def shell() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """`shell(words, user=None)`: a shell whose command line is `words`, alike with any other program's. `-s` is among
    them. `lives(shell)` in tests asks it; it is ended with the test.
    """
    started = []

    def start(words: list[str], user: int | None = None, cwd: Path = Path("/")) -> "subprocess.Popen[str]":
        given = {} if user is None else {"user": user, "group": user, "extra_groups": []}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(words, executable="/bin/sh", cwd=cwd, **pipes, **given))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def nobody() -> SecondUser:
    if os.geteuid() != 0:
        pytest.skip("a second user can only be acted by root")
    return SecondUser()


@pytest.fixture(scope="module")
def open_place() -> Iterator[Path]:
    """A folder that every user can pass, as `/home/user` often is; pytest's are closed to others by one above."""
    folder = Path(tempfile.mkdtemp(prefix="open-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


class PostgreSQL:
    """A cluster of our own on a Unix socket in `folder`; PostgreSQL refuses to run as root, so then as nobody."""

    def __init__(self, folder: Path, programs: Path):
        self.folder, self._programs, self._databases = folder, programs, 0
        self._free: list[str] = []
        self.user = "polyfleet"
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        words = ["--no-sync", "--auth=trust", "--encoding=UTF8", "--locale=C", f"--username={self.user}"]
        self._run("initdb", *words, "-D", str(folder / "data"))
        settings = ["listen_addresses = ''", f"unix_socket_directories = '{folder}'", "fsync = off"]
        with (folder / "data" / "postgresql.conf").open("a") as f:
            f.write("\n".join([*settings, "max_connections = 200", ""]))

    def start(self) -> None:
        self._run("pg_ctl", "start", "-w", "-t", "60", "-D", str(self.folder / "data"), "-l", str(self.folder / "log"))

    def stop(self, how: str = "immediate") -> None:
        self._run("pg_ctl", "stop", "-w", "-t", "60", "-m", how, "-D", str(self.folder / "data"))

    def restart(self) -> None:
        """As after a crash: no connection is told, the log is replayed."""
        self.stop()
        self.start()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Every process of it is stopped: connections are accepted by the kernel, and nothing answers."""
        first = psutil.Process(int((self.folder / "data" / "postmaster.pid").read_text().split()[0]))
        processes = [first, *first.children(recursive=True)]
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                process.resume()

    def url(self) -> str:
        """Of an empty database."""
        if self._free:
            return self._free.pop()
        self._databases += 1
        name = f"test_{self._databases}"
        self.sql("postgres", f"CREATE DATABASE {name} TEMPLATE template0")
        return f"postgresql://{self.user}@/{name}?host={self.folder}"

    def give_back(self, url: str) -> None:
        """For another test: a database has 300 files, and emptying one is quicker than making one."""
        name = url.partition("@/")[2].partition("?")[0]
        others = "datname = current_database() AND pid <> pg_backend_pid()"
        self.sql(url, f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE {others}")
        made = "nspname NOT LIKE 'pg\\_%' AND nspname <> 'information_schema'"
        schemas = [schema for (schema,) in self.sql(url, f"SELECT nspname FROM pg_namespace WHERE {made}")]
        dropped = [f'DROP SCHEMA "{schema}" CASCADE' for schema in schemas]
        self.sql(url, *dropped, "CREATE SCHEMA public", f"ALTER DATABASE {name} RESET ALL")
        self._free.append(url)

    def sql(self, database: str, *statements: str) -> list[tuple[Any, ...]]:
        """The rows of the last statement, by a connection of its own. `database` may be a URL of ours."""
        import psycopg

        name = database.partition("@/")[2].partition("?")[0] or database
        where = {"dbname": name, "user": self.user, "host": str(self.folder)}
        with psycopg.connect(**where, autocommit=True) as connection:
            for statement in statements:
                found = connection.execute(statement.encode())
            return found.fetchall() if found.description else []

    def _run(self, program: str, *arguments: str) -> None:
        as_nobody = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        ran = subprocess.run(
            [str(self._programs / program), *arguments],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if program == "initdb" else subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            **as_nobody,  # type: ignore[call-overload]
        )
        log = self.folder / "log"
        assert ran.returncode == 0, f"{program}: {ran.stdout} {log.read_text() if log.exists() else ''}"


@pytest.fixture(scope="session")
def postgresql(absent: Callable[[str, str], None]) -> Iterator[PostgreSQL]:
    """A running PostgreSQL for these tests alone."""
    found = shutil.which("initdb") or next(map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))), None)
    if found is None:
        absent("postgresql", "PostgreSQL is not installed here (Debian: apt install postgresql)")
    folder = Path(tempfile.mkdtemp(prefix="pf-pg-", dir="/tmp"))  # a socket's path has at most 107 bytes
    cluster = PostgreSQL(folder, Path(found).parent)
    cluster.start()
    yield cluster
    cluster.stop()
    shutil.rmtree(folder)

"""What holds for every process that a test starts."""

import getpass
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Callable, Iterator
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

import brief_reports
import draws
import garbage
import leftovers
import limits
import retries
import rewriting
import run_report
import schedule
import tiers
from postgresql_cluster import PostgreSQL
from s3_server import S3Server, missing_packages
from second_user import SecondUser
from terminals import Terminal

MAX_PROCESSES = 3
PROCESS_BYTES, OTHERS_BYTES = 1_700_000_000, 2_000_000_000
"""What a process of tests has at its end, and what the fleet of a test and the system need."""
TOY = Path(__file__).parent / "data" / "toy-vendor"


def pytest_addoption(parser: pytest.Parser) -> None:
    tiers.add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Triton's kernels are interpreted on the CPU, unless tests of a GPU are asked for (`-m gpu`). Triton settles that
    for a whole process when it is first imported, as torch.compile may do in any test; its code is the same either way.
    """
    if "gpu" not in config.option.markexpr:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    config.addinivalue_line("markers", "timeout(seconds): the limit of a test that may take longer than its tier's")
    if config.pluginmanager.hasplugin("hypothesispytest"):  # the second environment does without
        settle_hypothesis()
    plugins = [tiers.Tiers(config), schedule.Schedule(config), draws.Draws()]
    if config.pluginmanager.hasplugin("timeout"):
        plugins.append(limits.Limits())
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        plugins += [retries.Starts(), garbage.Garbage()]
    if hasattr(config, "workerinput"):
        plugins += [brief_reports.BriefReports(), rewriting.Rewriting()]
    if not hasattr(config, "workerinput"):
        plugins += reporting(config)
    for plugin in plugins:
        config.pluginmanager.register(plugin)


def reporting(config: pytest.Config) -> list[object]:
    """What only the process does that reports to the caller, and in a run within another run only in part."""
    run_report.heed_interrupts()
    of_its_own = leftovers.RUN not in os.environ
    plugins: list[object] = [run_report.RunReport(config)]  # those after it act at the end, in this order
    if of_its_own and os.environ.get(retries.SWITCH) != "no":
        plugins.append(retries.Retries(config))
    plugins.append(garbage.Uncollected(config))
    if of_its_own:
        plugins.append(leftovers.Cleaning(config))
    return plugins


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`--numprocesses=auto`: as each waits for others at times, more than cores, while there is memory."""
    free = psutil.virtual_memory().total - OTHERS_BYTES
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(2 * cores, MAX_PROCESSES, free // PROCESS_BYTES))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    return schedule.make_scheduler(config, log)


def settle_hypothesis() -> None:
    """No example has a limit of time: machines differ. In CI the examples of a property are the same in every run."""
    from hypothesis import HealthCheck, settings

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
        from workers.devices import backends

        backend = backends.create(name)
        if not backend.supports_dtype(dtype):
            pytest.skip(f"{backend.kind} has no native {dtype} here")

    return need


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
    folder = Path(tempfile.mkdtemp(prefix="open-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def postgresql(absent: Callable[[str, str], None]) -> Iterator[PostgreSQL]:
    """A running PostgreSQL for these tests alone."""
    found = shutil.which("initdb") or next(map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))), None)
    if found is None:
        absent("postgresql", "PostgreSQL is not installed here (Debian: apt install postgresql)")
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    cluster = PostgreSQL(folder, Path(found).parent)
    cluster.start()
    yield cluster
    cluster.stop()
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def s3(absent: Callable[[str, str], None]) -> Iterator[S3Server]:
    """A running object store that speaks S3 over HTTP."""
    if missing := missing_packages():
        absent("s3", f"{' and '.join(missing)} cannot be imported here (pip install '.[dev]')")
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def bucket(s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The URI of a prefix in an empty bucket, which this process and its children find."""
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path / "home"))
    for name, value in s3.variables.items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3.make_bucket()}/runs"

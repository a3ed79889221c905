"""What holds for every process that a test starts."""

import getpass
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Importing torch-xla or IPEX starts a pool of compilers, each of which imports torch, waited for when the process ends:
# six CPU seconds a process, and the suite starts a hundred. Ranks of those back ends are started without it too.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# What inductor keeps of a compiled program does not tell what ATEN_CPU_CAPABILITY allowed when it was made: a process
# that may use less takes code it cannot build (torch 2.13). Each has a folder of its own.
if "ATEN_CPU_CAPABILITY" in os.environ:
    kept = Path(tempfile.gettempdir()) / f"inductor-{getpass.getuser()}-{os.environ['ATEN_CPU_CAPABILITY']}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kept))
# Two files of tests run at a time: torch's threads that wait for each other sleep soon, and leave the CPU to others.
# No default for ranks: alone, a small training step takes 1.3 times as long with it (2 cores, median of 7 pairs).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

TOY = Path(__file__).parent / "data" / "toy-vendor"


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

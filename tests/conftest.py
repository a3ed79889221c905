"""What holds for every process that a test starts."""

import getpass
import os
import shutil
import tempfile
from pathlib import Path

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

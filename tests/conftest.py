"""What holds for every process that a test starts."""

import os

import pytest

# Importing torch-xla or IPEX starts a pool of compilers, each of which imports torch, waited for when the process ends:
# six CPU seconds a process, and the suite starts a hundred. Ranks of those back ends are started without it too.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Two files of tests run at a time: torch's threads that wait for each other sleep soon, and leave the CPU to others.
# No default for ranks: alone, a small training step takes 1.3 times as long with it (2 cores, median of 7 pairs).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")


@pytest.fixture
def needs_native():
    """`needs_native("bfloat16")` skips a test where this process's CPU, or the device named, has no units for it."""

    def need(dtype, name="cpu"):
        from workers import backends

        backend = backends.create(name)
        if not backend.supports_dtype(dtype):
            pytest.skip(f"{backend.kind} has no native {dtype} here")

    return need

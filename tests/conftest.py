"""What holds for every process that a test starts."""

import os

# Importing torch-xla or IPEX starts a pool of compilers, each of which imports torch, waited for when the process ends:
# six CPU seconds a process, and the suite starts a hundred. Ranks of those back ends are started without it too.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Two files of tests run at a time: torch's threads that wait for each other sleep soon, and leave the CPU to others.
# No default for ranks: alone, a small training step takes 1.3 times as long with it (2 cores, median of 7 pairs).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

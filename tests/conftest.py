"""What holds for every process that a test starts."""

import os

# Importing torch-xla or IPEX starts a pool of compilers, each of which imports torch, waited for when the process ends:
# six CPU seconds a process, and the suite starts a hundred. Ranks of those back ends are started without it too.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Ranks are started with this as well (workers/attempt/environment.py): two files of tests run at a time.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

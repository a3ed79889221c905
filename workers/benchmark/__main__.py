"""Benchmark session on this machine, without a fleet: `python -m workers.benchmark FOLDER BACKEND DEVICE SEED`.

It writes the path of its socket into FOLDER and serves until a request ends it or its parent process is gone.
"""

import os
import sys
from pathlib import Path


def main(folder: str, name: str, device: str, seed: str) -> None:
    from workers.benchmark.session import Session
    from workers.benchmark.session_server import serve
    from workers.devices import backends

    parent = os.getppid()
    with backends.create(name, int(device)) as backend:
        session = Session(backend, int(seed))
        serve(Path(folder), session.handle, lambda: os.getppid() != parent)


if __name__ == "__main__":
    main(*sys.argv[1:])

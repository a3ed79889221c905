"""`python -m orchestrator.server --home H [--port N]`: the process that `polyfleet server start` starts."""

import argparse
import gc
import sys
from pathlib import Path

gc.disable()  # imports leave no garbage, and collections would take a sixth of the CPU time of a start

from cluster.errors import PolyfleetError  # noqa: E402 - see above
from cluster.paths import home  # noqa: E402
from orchestrator.server.serve import serve  # noqa: E402
from orchestrator.server.server_log import log_to_stderr  # noqa: E402
from orchestrator.services.service import Service  # noqa: E402

gc.freeze()
gc.enable()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.server")
    parser.add_argument("--home", type=Path, default=home(), help="folder of the server's state and token")
    parser.add_argument("--port", type=int, help="loopback TCP port to listen on, too (0: any free port)")
    arguments = parser.parse_args()
    log_to_stderr()
    try:
        serve(arguments.home.absolute(), arguments.port, Service)
    except PolyfleetError as e:
        print(f"error: {e.message}", file=sys.stderr)  # noqa: T201 - daemon.py reads these two lines back
        print(f"  {e.remedy}", file=sys.stderr)  # noqa: T201
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

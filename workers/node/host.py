"""Start and stop the nodes of one host, and maybe the head; `polyfleet up` runs this over SSH.

    python -m workers.node.host lead < request    start the fleet's head, and the process that keeps it running
    python -m workers.node.host join < request    start missing nodes, and a process that restarts those that end later
    python -m workers.node.host leave             stop all of them
    python -m workers.node.host keep              the process that restarts them

POLYFLEET_HOME is this fleet's folder on the machine. Replies are lines of JSON, as those of
`cluster.hosts.environment_setup`.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from cluster.errors import PolyfleetError, UserError
from cluster.hosts.environment_setup import send
from cluster.nodes import joined_nodes
from cluster.serialization import from_plain
from workers.devices.discovery import accelerators


def main(verb: str) -> None:
    if verb == "keep":
        joined_nodes.run_watchdog()
        return
    try:
        send(done=VERBS[verb]())
    except PolyfleetError as e:
        send(error={"message": e.message, "remedy": e.remedy, "user": isinstance(e, UserError)})
    except OSError as e:
        send(error={"message": f"{e.filename}: {e.strerror}", "remedy": "", "user": False})


def _request() -> joined_nodes.Request:
    return from_plain(joined_nodes.Request, json.load(sys.stdin))


def _progress(line: str) -> None:
    send(progress=line)


VERBS: dict[str, Callable[[], Any]] = {
    "lead": lambda: joined_nodes.start_head(_request(), _progress),
    "join": lambda: joined_nodes.join(_request(), accelerators(), _progress),
    "leave": lambda: joined_nodes.leave(_progress),
}


if __name__ == "__main__":
    main(sys.argv[1])

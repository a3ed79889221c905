"""Termination notice: before a node stops, its attempts get time to save.

The node's folder then contains the file `notice`, JSON of {"reason", "grace_s"}: the node's agent makes its attempts
save within that time. `polyfleet down` writes none: it stops the attempts itself before it stops their nodes.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from cluster.host.processes import ProcessId, processes_of_module
from cluster.paths import write_private

FILE = "notice"
GRACE_S = 30.0
"""Grace period that Kubernetes gives a pod, and the minimum for spot machines of most clouds (reliability.md F23)."""
CHECK_EVERY_S = 0.25


def write_notice(folder: Path, reason: str, grace_s: float) -> None:
    write_private(folder / FILE, json.dumps({"reason": reason, "grace_s": grace_s}))


def clear_notice(folder: Path) -> None:
    """Remove the notice of an earlier node: it does not apply to the node that starts now."""
    (folder / FILE).unlink(missing_ok=True)


def supervisors_in(folder: Path) -> list[ProcessId]:
    """Return the supervisors of attempts whose folders are below `folder`.

    A supervisor that ends also ends its ranks.
    """
    return [
        process
        for process, arguments in processes_of_module("workers.attempt")
        if arguments and Path(arguments[0]).is_relative_to(folder)
    ]


def notify_and_wait(folder: Path, reason: str, on_notice: Callable[[float], None], grace_s: float = GRACE_S) -> bool:
    """Write the notice and wait until the attempts of the node at `folder` have ended.

    `on_notice` is called once with the seconds that are left. Returns whether all ended within `grace_s`. Without
    attempts, returns True at once, and neither writes nor calls anything.
    """
    if not supervisors_in(folder):
        return True
    deadline = time.monotonic() + grace_s
    write_notice(folder, reason, grace_s)
    on_notice(grace_s)
    while supervisors_in(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(CHECK_EVERY_S)
    return True


if __name__ == "__main__":  # the preStop hook of a pod: Kubernetes waits for it before it ends the pod's processes
    notify_and_wait(Path(os.environ["POLYFLEET_NODE_DIR"]), "the pod is being terminated", lambda _: None)

"""A node that is told to end gives its attempts time to save.

Its folder then holds `notice`, JSON of {"reason", "grace_s"}: the node's agent asks its attempts to save within that
time. `polyfleet down` writes none: it ends the attempts itself before it ends their nodes.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from cluster.paths import write_private
from cluster.processes import ProcessId, processes_of_module

FILE = "notice"
GRACE_S = 30.0
"""What Kubernetes gives a pod, and spot machines of most clouds at least (reliability.md F23)."""
LOOK_EVERY_S = 0.25


def write_notice(folder: Path, reason: str, grace_s: float) -> None:
    write_private(folder / FILE, json.dumps({"reason": reason, "grace_s": grace_s}))


def clear_notice(folder: Path) -> None:
    """Of a node that is started: what was told to the one before does not concern it."""
    (folder / FILE).unlink(missing_ok=True)


def supervisors_in(folder: Path) -> list[ProcessId]:
    """The supervisors of attempts whose folders lie below `folder`. They take their ranks along when they end."""
    return [
        process
        for process, words in processes_of_module("workers.attempt")
        if words and Path(words[0]).is_relative_to(folder)
    ]


def notify_and_wait(folder: Path, reason: str, tell: Callable[[float], None], grace_s: float = GRACE_S) -> bool:
    """Write the notice, `tell` others how many seconds are left, and wait for the attempts of the node at `folder` to
    end. Whether they did within `grace_s`; at once where there are none, and then nobody is told.
    """
    if not supervisors_in(folder):
        return True
    deadline = time.monotonic() + grace_s
    write_notice(folder, reason, grace_s)
    tell(grace_s)
    while supervisors_in(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_EVERY_S)
    return True


if __name__ == "__main__":  # a pod's preStop: Kubernetes waits for it before it ends the pod's processes
    notify_and_wait(Path(os.environ["POLYFLEET_NODE_DIR"]), "the pod was told to end", lambda _: None)

"""Versions of Ray and Python of a cluster that others run, checked before this fleet joins it.

All nodes of a Ray cluster need one version of Ray and one minor version of Python. Ray itself detects a mismatch only
when a node of ours starts there.
"""

import json
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from cluster.errors import SpecError
from cluster.nodes.ray_node import SETTINGS, inherited_environment, token_environment

REPLY_TIMEOUT_S = 30.0

# Runs in a child process: Ray reads the token's path only once, at import, and may end the process that it is in.
_READ_METADATA = """
import sys
from ray._common.usage import usage_constants
from ray._private import ray_constants
from ray._raylet import GcsClient
metadata = GcsClient(address=sys.argv[1]).internal_kv_get(
    usage_constants.CLUSTER_METADATA_KEY, namespace=ray_constants.KV_NAMESPACE_CLUSTER)
print((metadata or b"").decode())
"""


@dataclass(frozen=True, slots=True)
class Versions:
    ray: str
    python: str

    @property
    def minor(self) -> str:
        return ".".join(self.python.split(".")[:2])

    def __str__(self) -> str:
        return f"Ray {self.ray} and Python {self.python}"


def own_versions() -> Versions:
    return Versions(version("ray"), platform.python_version())


def read(address: str, token: Path) -> Versions | None:
    """Return the cluster's versions, or None if they cannot be read: joining the cluster then shows why."""
    environment = (
        inherited_environment()
        | {k: v for k, v in SETTINGS.items() if k != "RAY_START_HOOK"}
        | token_environment(token)
    )
    command = [sys.executable, "-P", "-c", _READ_METADATA, address]
    try:
        process = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=REPLY_TIMEOUT_S,
            check=False,
        )
        reply = json.loads(process.stdout.decode().strip().splitlines()[-1])
        return Versions(str(reply["ray_version"]), str(reply["python_version"]))
    except (OSError, subprocess.TimeoutExpired, ValueError, LookupError, TypeError):
        return None


def check_versions(address: str, theirs: Versions | None, ours: Versions) -> None:
    """Raise SpecError unless both run the same Ray and minor Python; patch releases of Python may differ."""
    if theirs is None or (theirs.ray == ours.ray and theirs.minor == ours.minor):
        return

    environment = f"a Python {theirs.minor} that has ray=={theirs.ray}"
    remedy = (
        f"start the cluster with ray=={ours.ray} under Python {ours.minor}"
        if theirs.ray.split(".")[:2] != ours.ray.split(".")[:2]
        else f"run Polyfleet from {environment}, or start the cluster with ray=={ours.ray} under Python {ours.minor}"
    )
    raise SpecError("address", f"the cluster at {address} runs {theirs}, and this Polyfleet {ours}", remedy)

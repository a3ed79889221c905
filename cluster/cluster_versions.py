"""Which Ray and Python a cluster that others run was started with, read before anything of ours joins it.

Ray wants one version of itself and one minor Python under all of a cluster; it says so itself only once a node of ours
is being started there.
"""

import json
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from cluster.errors import SpecError
from cluster.ray_node import SETTINGS, inherited_environment, token_environment

ANSWER_S = 30.0

# In a process of its own: Ray reads the token's place once, when it is imported, and may end the process it is in.
_ASK = """
import sys
from ray._common.usage import usage_constants
from ray._private import ray_constants
from ray._raylet import GcsClient
found = GcsClient(address=sys.argv[1]).internal_kv_get(
    usage_constants.CLUSTER_METADATA_KEY, namespace=ray_constants.KV_NAMESPACE_CLUSTER)
print((found or b"").decode())
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


def ours() -> Versions:
    return Versions(version("ray"), platform.python_version())


def read(address: str, token: Path) -> Versions | None:
    """None where the cluster does not tell: joining it says why."""
    environment = (
        inherited_environment()
        | {k: v for k, v in SETTINGS.items() if k != "RAY_START_HOOK"}
        | token_environment(token)
    )
    command = [sys.executable, "-P", "-c", _ASK, address]
    try:
        asked = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER_S, check=False
        )
        told = json.loads(asked.stdout.decode().strip().splitlines()[-1])
        return Versions(str(told["ray_version"]), str(told["python_version"]))
    except (OSError, subprocess.TimeoutExpired, ValueError, LookupError, TypeError):
        return None


def refuse_other(address: str, theirs: Versions | None, own: Versions) -> None:
    """Raises SpecError. Patch releases of Python may differ."""
    if theirs is None or (theirs.ray == own.ray and theirs.minor == own.minor):
        return
    wanted = f"a Python {theirs.minor} that has ray=={theirs.ray}"
    remedy = (
        f"start the cluster with ray=={own.ray} under Python {own.minor}"
        if theirs.ray.split(".")[:2] != own.ray.split(".")[:2]
        else f"run Polyfleet from {wanted}, or start the cluster with ray=={own.ray} under Python {own.minor}"
    )
    raise SpecError("address", f"the cluster at {address} runs {theirs}, and this Polyfleet {own}", remedy)

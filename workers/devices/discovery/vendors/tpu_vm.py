"""Facts about a TPU VM's slice, from the variables that GKE sets, else from Compute Engine's metadata server.

Sources: Google's "Cloud TPU in GKE" for the variables, torch_xla's _internal/tpu.py for the `tpu-env` attribute, Ray's
_private/accelerators/tpu.py for the name of the slice: TPU_NAME, or the `instance-id` attribute. Without TPU_NAME, the
first of TPU_WORKER_HOSTNAMES is its name.
"""

import math
import re
from collections.abc import Mapping

from cluster.types import Scalar

TIMEOUT_S = 1.0
# Our name -> the environment variable, and the key in tpu-env.
KEYS = {
    "accelerator_type": ("TPU_ACCELERATOR_TYPE", "ACCELERATOR_TYPE"),
    "topology": ("TPU_TOPOLOGY", "TOPOLOGY"),
    "worker_id": ("TPU_WORKER_ID", "WORKER_ID"),
}


def facts(environ: Mapping[str, str]) -> dict[str, Scalar]:
    """Return accelerator_type (`v5litepod-8`), topology (`2x4`), worker_id and slice_name, without unknown ones."""
    values = {fact: environ[variable] for fact, (variable, _) in KEYS.items() if environ.get(variable)}
    first_host = environ.get("TPU_WORKER_HOSTNAMES", "").partition(",")[0]  # the list is the same on all hosts
    if name := environ.get("TPU_NAME") or first_host:
        values["slice_name"] = name
    if "accelerator_type" not in values:
        values = _from_metadata(environ) | values
    return {name: int(value) if name == "worker_id" and value.isdigit() else value for name, value in values.items()}


def slice_hosts(vm: Mapping[str, Scalar], chips: int) -> int:
    """Return the number of hosts of the slice, each with `chips` chips; 1 if its topology is unknown."""
    sides = str(vm.get("topology", "")).split("x")
    in_slice = math.prod(map(int, sides)) if all(side.isdigit() for side in sides) else 0
    return max(1, in_slice // chips) if chips and in_slice % chips == 0 else 1


def _from_metadata(environ: Mapping[str, str]) -> dict[str, str]:
    """Read `tpu-env`, lines of `KEY: 'value'`, and the slice's name from the metadata server."""
    if not (text := _attribute("tpu-env", environ)):
        return {}
    pairs = dict(re.findall(r"^(\w+):\s*'?([^'\n]*)'?\s*$", text, re.MULTILINE))
    values = {name: pairs[key] for name, (_, key) in KEYS.items() if pairs.get(key)}
    name = _attribute("instance-id", environ).strip()
    return values | ({"slice_name": name} if name else {})


def _attribute(name: str, environ: Mapping[str, str]) -> str:
    """Read an attribute from the metadata server, or from GCE_METADATA_HOST, like Google's libraries; "" if absent."""
    import urllib.request  # imported only here: it takes 10 ms, which machines without a TPU need not spend

    host = environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    address = f"http://{host}/computeMetadata/v1/instance/attributes/{name}"
    request = urllib.request.Request(address, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310
            return str(response.read(1 << 16).decode(errors="replace"))
    except (OSError, ValueError):  # URLError and TimeoutError are OSErrors
        return ""

"""Facts about a TPU VM's slice, from the variables that GKE sets, else from Compute Engine's metadata server.

Sources: Google's "Cloud TPU in GKE" for the variables, torch_xla's _internal/tpu.py for the `tpu-env` attribute.
"""

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
    """Return accelerator_type (`v5litepod-8`), topology (`2x4`) and worker_id, without those that are unknown."""
    values = {fact: environ[variable] for fact, (variable, _) in KEYS.items() if environ.get(variable)}
    if "accelerator_type" not in values:
        values = _from_metadata(environ) | values
    return {name: int(value) if name == "worker_id" and value.isdigit() else value for name, value in values.items()}


def _from_metadata(environ: Mapping[str, str]) -> dict[str, str]:
    """Read lines of `KEY: 'value'` from the metadata server, or from GCE_METADATA_HOST, like Google's libraries."""
    import urllib.request  # imported only here: it takes 10 ms, which machines without a TPU need not spend

    host = environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    address = f"http://{host}/computeMetadata/v1/instance/attributes/tpu-env"
    request = urllib.request.Request(address, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310
            text = response.read(1 << 16).decode(errors="replace")
    except (OSError, ValueError):  # URLError and TimeoutError are OSErrors
        return {}
    pairs = dict(re.findall(r"^(\w+):\s*'?([^'\n]*)'?\s*$", text, re.MULTILINE))
    return {name: pairs[key] for name, (_, key) in KEYS.items() if pairs.get(key)}

"""What a TPU VM tells of its slice: from the variables GKE sets, else from the metadata server of Compute Engine.

Sources: Google's "Cloud TPU in GKE" for the variables, torch_xla's _internal/tpu.py for the `tpu-env` attribute.
"""

import re
from collections.abc import Mapping

from cluster.types import Scalar

TIMEOUT_S = 1.0
# Ours -> the variable, and the key inside tpu-env.
KEYS = {
    "accelerator_type": ("TPU_ACCELERATOR_TYPE", "ACCELERATOR_TYPE"),
    "topology": ("TPU_TOPOLOGY", "TOPOLOGY"),
    "worker_id": ("TPU_WORKER_ID", "WORKER_ID"),
}


def facts(environ: Mapping[str, str]) -> dict[str, Scalar]:
    """accelerator_type (`v5litepod-8`), topology (`2x4`), worker_id; only those that somebody tells."""
    told = {ours: environ[variable] for ours, (variable, _) in KEYS.items() if environ.get(variable)}
    if "accelerator_type" not in told:
        told = _from_metadata(environ) | told
    return {name: int(value) if name == "worker_id" and value.isdigit() else value for name, value in told.items()}


def _from_metadata(environ: Mapping[str, str]) -> dict[str, str]:
    """Lines `KEY: 'value'`. GCE_METADATA_HOST names another server, as Google's own libraries have it."""
    import urllib.request  # on first use: 10 ms that a machine without a TPU need not wait

    host = environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    address = f"http://{host}/computeMetadata/v1/instance/attributes/tpu-env"
    request = urllib.request.Request(address, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
            text = answer.read(1 << 16).decode(errors="replace")
    except (OSError, ValueError):  # URLError and TimeoutError are OSErrors
        return {}
    pairs = dict(re.findall(r"^(\w+):\s*'?([^'\n]*)'?\s*$", text, re.MULTILINE))
    return {ours: pairs[key] for ours, (_, key) in KEYS.items() if pairs.get(key)}

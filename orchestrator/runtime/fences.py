"""The second channel of a lease: Ray's key-value store says which epoch of a job counts when the server is silent."""

from orchestrator.runtime.engine import in_time
from workers.messages import FENCE_KEY

LIMIT_S = 10.0


@in_time("write a fence", LIMIT_S)
def raise_to(job: str, epoch: int) -> None:
    """Attempts of an older epoch stop as soon as their agent reads it."""
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(FENCE_KEY.format(fleet="", job=job), str(epoch), overwrite=True)

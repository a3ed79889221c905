"""The second channel of a lease: Ray's key-value store says which epoch of a job counts when the server is silent."""

from workers.messages import FENCE_KEY


def raise_to(job: str, epoch: int) -> None:
    """Attempts of an older epoch stop as soon as their agent reads it."""
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(FENCE_KEY.format(job=job), str(epoch), overwrite=True)

"""The second channel of a lease: which epoch of a job counts when the server is silent. It lies in Ray's key-value
store, and for nodes of this machine in a folder that is read while Ray's head does not answer.
"""

from cluster import fences
from cluster.identity import fleet_identity
from cluster.paths import home
from orchestrator.runtime.engine import in_time
from workers.messages import FENCE_KEY

LIMIT_S = 10.0


@in_time("raise a fence", LIMIT_S)
def raise_to(job: str, epoch: int) -> int:
    """Attempts of an older epoch stop as soon as their agent reads it. Returns what stands, which may be higher."""
    stands = _read(job)
    if stands < epoch:
        _write(job, epoch)
    return max(stands, epoch)


@in_time("raise a fence", LIMIT_S)
def take(job: str, epoch: int, ours: bool) -> int:
    """For an attempt that is to start. Where that epoch or a newer one may have run already, nothing changes, and what
    stands is returned; else 0. `ours`: the fence may stand there since we raised it.
    """
    stands = _read(job)
    if stands > epoch or (stands == epoch and not ours):
        return stands
    _write(job, epoch)
    return 0


@in_time("lower a fence", LIMIT_S)
def lower_to(job: str, epoch: int) -> int:
    """Take down a fence that stands just above `epoch`. Returns what stands."""
    stands = _read(job)
    if stands == epoch + 1:
        _write(job, epoch)
        return epoch
    return stands


@in_time("remove a fence", LIMIT_S)
def forget(job: str) -> None:
    """Of a job that was removed: nothing of it can run any more."""
    from ray.experimental.internal_kv import _internal_kv_del

    fences.forget(fences.folder_here(), job)
    _internal_kv_del(_key(job))


def _key(job: str) -> str:
    return FENCE_KEY.format(fleet=fleet_identity(home()), job=job)


def _read(job: str) -> int:
    from ray.experimental.internal_kv import _internal_kv_get

    found: bytes | None = _internal_kv_get(_key(job))
    return int(found) if found else 0


def _write(job: str, epoch: int) -> None:
    """First where it is read second: what was told to be written can be read everywhere."""
    from ray.experimental.internal_kv import _internal_kv_put

    fences.write(fences.folder_here(), job, epoch)
    _internal_kv_put(_key(job), str(epoch), overwrite=True)

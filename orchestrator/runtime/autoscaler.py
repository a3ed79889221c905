"""Ray's autoscaler (version 2), asked through the cluster's head: which nodes there should be, and what became of those
asked for before. It waits for Ray's head: have it called by RAY.ask or RAY.run.
"""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LIMIT_S = 10
FAILED_S = 600.0
"""A launch that failed longer ago tells nothing of the next."""
MOST_CHARACTERS = 200
REQUEST_ID = re.compile(r" with request id [0-9a-f-]+")


def ask(requests: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Takes the place of what was asked for before, by anybody. Returns why launches failed lately, by node type: the
    pool's name in the files that we render.
    """
    from ray.autoscaler.v2 import sdk

    address = _address()
    sdk.request_cluster_resources(address, [dict(request) for request in requests], timeout=LIMIT_S)
    return failed(sdk.get_cluster_status(address, timeout=LIMIT_S).failed_launches, time.time())


def failed(launches: Iterable[Any], now_s: float) -> dict[str, str]:
    """The newest reason of each type. Of clouds' own words Ray 2.60 passes some on; all are in its autoscaler's log."""
    recent = [launch for launch in launches if now_s - (launch.failed_ts_s or 0) < FAILED_S]
    return {
        launch.ray_node_type_name: _words(launch.details)
        for launch in sorted(recent, key=lambda launch: launch.failed_ts_s)
    }


def _words(details: str | None) -> str:
    plain = " ".join(REQUEST_ID.sub("", details or "").split()).strip(" :")
    return plain[:MOST_CHARACTERS] or "a launch failed; the log of Ray's autoscaler says why"


def _address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)

"""Requests to Ray's autoscaler (version 2): the nodes we need, and why earlier launches failed.

Functions here wait for Ray's head: call them through RAY.call or RAY.submit.
"""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LIMIT_S = 10
FAILED_S = 600.0
"""Age in seconds from which a failed launch is ignored: it says nothing about the next one."""
MAX_LENGTH = 200
REQUEST_ID = re.compile(r" with request id [0-9a-f-]+")


def request_nodes(requests: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Replace the cluster's resource request, and return recent launch failures.

    The request may have been made by any program. The result maps a node type (the pool's name in files that we render)
    to the reason.
    """
    from ray.autoscaler.v2 import sdk

    address = _address()
    sdk.request_cluster_resources(address, [dict(request) for request in requests], timeout=LIMIT_S)
    return failed_launches(sdk.get_cluster_status(address, timeout=LIMIT_S).failed_launches, time.time())


def failed_launches(launches: Iterable[Any], now_s: float) -> dict[str, str]:
    """The newest failure reason of each node type.

    Ray 2.60 passes on only some of a cloud's messages; the log of its autoscaler has all.
    """
    recent = [launch for launch in launches if now_s - (launch.failed_ts_s or 0) < FAILED_S]
    return {
        launch.ray_node_type_name: _failure_text(launch.details)
        for launch in sorted(recent, key=lambda launch: launch.failed_ts_s)
    }


def _failure_text(details: str | None) -> str:
    plain = " ".join(REQUEST_ID.sub("", details or "").split()).strip(" :")
    return plain[:MAX_LENGTH] or "a launch failed; the log of Ray's autoscaler says why"


def _address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)

"""Join the results of one benchmark run in several pools: ratios with their uncertainty, and how far outputs lie apart.

Pure: job views in (see orchestrator/service.py), plain data out. Others are compared with the first pool that has
a result.
"""

import math
from typing import Any

Data = dict[str, Any]
NOTE = "measured one after the other: a machine that changed meanwhile shows in the ratios, so none is a verdict"


def compare(jobs: list[Data]) -> Data:
    """`rows`: one per pool and case. `divergence`: one per pool. `failed`: pools without a result, with the reason.

    `speed_ratio` is the first pool's time over this pool's: 2 means twice as fast. Its interval combines both intervals
    and is thus wider than 95 %; `intervals` says whether they lie `apart` or `overlap`. It is no verdict:
    the pools were not measured in the same minutes, and a verdict needs rounds that alternate.
    """
    measured = [job for job in jobs if job["state"] == "SUCCEEDED" and job["result"]]
    first = measured[0] if measured else None
    return {
        "reference_pool": first["pool"] if first else None,
        "rows": [_row(job, row, _same_case(first, row["case"])) for job in measured for row in job["result"]["rows"]],
        "divergence": [_divergence(job, first) for job in measured if first],
        "failed": [
            {"pool": job["pool"], "job": job["id"], "reason": _reason(job)} for job in jobs if job not in measured
        ],
        "note": NOTE if len(measured) > 1 else "",
    }


def _same_case(job: Data | None, case: str) -> Data | None:
    return next((row for row in job["result"]["rows"] if row["case"] == case), None) if job else None


def _row(job: Data, row: Data, first: Data | None) -> Data:
    result = job["result"]
    identity = {"pool": job["pool"], "kind": result["kind"], "emulated": result["emulated"], "job": job["id"]}
    return (
        identity
        | {k: v for k, v in row.items() if k != "samples_s"}
        | _ratio(row, first)
        | {"samples_s": row["samples_s"]}
    )


def _ratio(row: Data, first: Data | None) -> Data:
    if first is None:
        return {
            "speed_ratio": None,
            "speed_ratio_low": None,
            "speed_ratio_high": None,
            "intervals": "",
        }
    if row is first:
        return {"speed_ratio": 1.0, "speed_ratio_low": 1.0, "speed_ratio_high": 1.0, "intervals": "reference"}
    low, high = first["ci_low_s"] / row["ci_high_s"], first["ci_high_s"] / row["ci_low_s"]
    return {
        "speed_ratio": first["median_s"] / row["median_s"],
        "speed_ratio_low": low,
        "speed_ratio_high": high,
        "intervals": "apart" if low > 1 or high < 1 else "overlap",
    }


def _divergence(job: Data, first: Data) -> Data:
    """From the CPU float32 reference, computed where the job ran, and from the first pool's own output."""
    return {
        "pool": job["pool"],
        "kind": job["result"]["kind"],
        "from_reference": job["result"]["divergence"],
        "from_first_pool": {"pool": first["pool"]} | outputs_apart(job["result"], first["result"]),
    }


def outputs_apart(one: Data, other: Data) -> Data:
    """Largest distance between two output samples: `max_abs`, and `max_rel` over the largest value of `other`.

    Both are None with a `reason` where the samples do not belong to the same computation.
    """
    for key, what in (("weights_sha256", "weights"), ("inputs_sha256", "inputs"), ("output_shape", "output shapes")):
        if one[key] != other[key]:
            return {"max_abs": None, "max_rel": None, "reason": f"not comparable: the {what} differ"}
    pairs = [(float(a), float(b)) for a, b in zip(one["output_sample"], other["output_sample"], strict=True)]
    if any(math.isfinite(a) != math.isfinite(b) for a, b in pairs):
        return {"max_abs": None, "max_rel": None, "reason": "one output has NaN or infinity where the other has none"}
    finite = [(a, b) for a, b in pairs if math.isfinite(a)]
    apart = max((abs(a - b) for a, b in finite), default=0.0)
    scale = max((abs(b) for _, b in finite), default=0.0)
    return {"max_abs": apart, "max_rel": apart / scale if scale else None, "reason": ""}


def _reason(job: Data) -> str:
    failure = job.get("failure") or {}
    return str(failure.get("message") or job.get("reason") or f"ended as {job['state']}")

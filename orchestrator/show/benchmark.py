"""The comparison of pools as one table."""

from typing import Any

from orchestrator.show.grid import Stack, grid
from orchestrator.show.units import duration

Data = dict[str, Any]


def comparison(answer: Data) -> Stack:
    """One line per pool: times with their 95 % intervals, ratio to the first pool, how far outputs lie apart."""
    pools = list(dict.fromkeys(row["pool"] for row in answer["rows"]))
    columns = (
        "POOL",
        "KIND",
        "FORWARD",
        "TRAINING STEP",
        "ITEMS/S",
        "RATIO",
        "INTERVALS",
        "FROM CPU FP32",
        "FROM FIRST POOL",
    )
    table = grid(columns, (_line(pool, answer) for pool in pools), empty="no pool has a result")
    failed = [f"{f['pool']}: no result, {f['reason']}{_more(f['job'])}" for f in answer["failed"]]
    notes = [answer["note"]] if answer["note"] else []
    return Stack((table, *(["", *failed, *notes] if failed or notes else [])))


def _more(job: str) -> str:
    return f"; `polyfleet show {job}` tells more" if job else ""


def _line(pool: str, answer: Data) -> tuple[Any, ...]:
    cases = {row["case"]: row for row in answer["rows"] if row["pool"] == pool}
    main = cases.get("forward") or next(iter(cases.values()))
    apart = next(d for d in answer["divergence"] if d["pool"] == pool)
    emulated = " (emulated)" if main["emulated"] and "emulated" not in main["kind"] else ""
    return (
        pool,
        main["kind"] + emulated,
        _time(cases.get("forward")),
        _time(cases.get("training_step")),
        f"{main['items_per_s']:,.0f}",
        _ratio(main),
        main["intervals"],
        _apart(apart["from_reference"]),
        _apart(apart["from_first_pool"]) if pool != answer["reference_pool"] else "",
    )


def _time(row: Data | None) -> str:
    return f"{duration(row['median_s'])} [{duration(row['ci_low_s'])}, {duration(row['ci_high_s'])}]" if row else ""


def _ratio(row: Data) -> str:
    if row["speed_ratio"] is None:
        return ""
    return f"{row['speed_ratio']:.2f}× [{row['speed_ratio_low']:.2f}, {row['speed_ratio_high']:.2f}]"


def _apart(data: Data) -> str:
    if data.get("max_abs") is None:
        return str(data.get("reason") or "")
    relative = data.get("max_rel")
    return f"{data['max_abs']:.1e}" + (f" (rel {relative:.1e})" if relative is not None else "")

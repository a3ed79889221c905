"""Summarize the lines of a run: times with intervals, ratios with verdicts, rates with their limits. Pure.

The lines contain every sample and everything else is computed here, so a newer Polyfleet improves reports of old runs.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict
from statistics import median
from typing import Any

from cluster.catalogue.precision import BYTES, SHORT_OF, long_name
from cluster.errors import NotFound
from orchestrator.benchmark import comparison
from orchestrator.units import iso
from workers.benchmark.cases import catalogue
from workers.benchmark.host import classify
from workers.measurement import statistics

SCHEMA = 2
LINE_FORMAT = 2
"""Format of the lines of a run: docs/benchmark-format.md."""
MEASURED = "measured"
Data = dict[str, Any]


def summarize(lines: Iterable[Data]) -> Data:
    """Return {"run", "request", "targets", "results", "hosts", "state", …}.

    Of a result measured twice the last counts. `time_s` is consistent with the ratio: the reference's `time_s` over it
    is the ratio.
    """
    lines = list(lines)
    header = next((line for line in lines if line["line"] == "started"), {})
    footer = next((line for line in reversed(lines) if line["line"] == "ended"), None)
    targets = {line["target"]: {"host": line["host"], **line["facts"]} for line in lines if line["line"] == "target"}
    lines_by_id = {line["id"]: line for line in lines if line["line"] == "result"}
    order = {name: position for position, name in enumerate(_target_order(header, targets))}
    results = sorted(lines_by_id.values(), key=lambda c: order.get(c["target"], len(order)))
    summaries = {result["id"]: _summary(result, targets.get(result["target"], {})) for result in results}
    _compare(results, summaries, targets)
    for summary in summaries.values():
        summary["time_s"] = _time_s(summary, summaries)
    _limits(summaries, targets)
    return {
        "schema": SCHEMA,
        "run": header.get("run", ""),
        "request": header.get("request", {}),
        "targets": [{"target": name, **targets[name]} for name in sorted(targets, key=lambda n: order.get(n, 0))],
        "lost": {line["target"]: line["reason"] for line in lines if line["line"] == "lost"},
        "results": [summaries[line["id"]] for line in lines_by_id.values()],
        "hosts": _hosts(lines_by_id.values()),
        "state": footer["state"] if footer else "RUNNING",
        "reason": footer["reason"] if footer else "",
        "started_at": iso(header.get("time")),
        "ended_at": iso(footer.get("time")) if footer else None,
    }


def merge_runs(runs: Iterable[Iterable[Data]]) -> list[Data]:
    """Merge the lines of several runs, for example of machines that are not in one fleet.

    Targets of the first run come first; a later target with the same name gets its run as a suffix.
    """
    first, *others = [list(lines) for lines in runs]
    merged, names_in_use = list(first), {line["target"] for line in first if line["line"] == "target"}
    for lines in others:
        run = next((line["run"] for line in lines if line["line"] == "started"), "another")
        names = {line["target"]: line["target"] for line in lines if line["line"] == "target"}
        names = {name: f"{name}@{run}" if name in names_in_use else name for name in names}
        names_in_use |= set(names.values())
        merged += [_renamed(line, names) for line in lines if line["line"] in ("target", "result", "lost")]
    return merged


def _renamed(line: Data, names: dict[str, str]) -> Data:
    name = names.get(line["target"], line["target"])
    new_id = {"id": f"{line['case']}@{name}/{line['id'].rpartition('@')[2].partition('/')[2]}"} if "id" in line else {}
    return line | {"target": name} | new_id


def _target_order(header: Data, targets: Data) -> list[str]:
    """Names of targets in the order of the request: the others are compared with the first."""
    requested = [target["target"] for target in header.get("targets", [])]
    return [*requested, *(name for name in targets if name not in requested)]


def _summary(result: Data, target: Data) -> Data:
    """Summarize one result, without its samples."""
    fields = {k: v for k, v in result.items() if k not in ("line", "blocks", "control_blocks", "seq", "time")}
    fields |= {"kind": target.get("kind", ""), "pool": target.get("pool", "")}
    if result["status"] != MEASURED or not result["blocks"]:
        return fields | {"status": result["status"] if result["status"] != MEASURED else "skipped", "call_s": None}
    blocks = result["blocks"]
    call = statistics.spread([statistics.call_s(b) for b in blocks])
    return fields | {
        "call_s": call,
        "single_call_s": statistics.spread([b["single_call_s"] for b in blocks]),
        "fastest_part_s": median(statistics.fastest_part_s(b) for b in blocks),
        "cpu_s": median(b["cpu_s"] / b["calls"] / len(b["parts_s"]) for b in blocks),
        "rounds": len(blocks),
        "preempted": sum(b["preempted"] > 0 for b in blocks) / len(blocks),
        "noise": statistics.noise(result["blocks"], result["control_blocks"]),
        "compile_s": max(result.get("first_call_s", call["median"]) - call["median"], 0.0),
        **_rates(result, call["median"]),
        **_prices(result, target, call["median"]),
        "joules_per_item": joules_per_item(result),
    }  # fmt: skip


def _rates(result: Data, call_s: float) -> Data:
    items, flops = result.get("items") or 1, result.get("flops") or 0
    moved = result.get("min_bytes") or _moved(result)
    return {
        "items_per_s": items / call_s,
        "flops_per_s": flops / call_s if flops else None,
        "bytes_per_s": moved / call_s if moved else None,
    }


def _moved(result: Data) -> float:
    """Bytes per call by the case's formula, for lines that lack them."""
    try:
        return catalogue.find(result["case"]).bytes(BYTES[long_name(result["precision"])])
    except NotFound:
        return 0.0


def _prices(result: Data, target: Data, call_s: float) -> Data:
    """Price of a million items, from the pool's price per hour; None if the pool declares none."""
    per_hour = target.get("price_per_hour")
    if not per_hour:
        return {"price_per_million": None, "price_source": ""}
    items = result.get("items") or 1
    return {
        "price_per_million": per_hour / 3600 * call_s / items * 1e6,
        "price_source": target.get("price_source", ""),
    }


def joules_per_item(result: Data) -> float | None:
    """Energy per item by the device's own counter; None if it has none."""
    energy = result.get("energy") or {}
    joules = energy.get("joules_per_call") if isinstance(energy, dict) else None
    return joules / (result.get("items") or 1) if joules is not None else None


def _compare(results: list[Data], summaries: dict[str, Data], targets: dict[str, Data]) -> None:
    """Compare each result with its reference. The verdicts are corrected for multiple comparisons (Holm)."""
    measured = [result for result in results if summaries[result["id"]]["call_s"]]
    pairs = [
        (result, other) for result in measured if (other := comparison.find_reference(result, measured)) is not None
    ]
    comparisons = [(result, other, comparison.compare_results(other, result)) for result, other in pairs]
    significant = statistics.holm([ratio.p for _, _, ratio in comparisons])
    for (result, other, ratio), is_significant in zip(comparisons, significant, strict=True):
        noise = max(_host_noise(result, summaries), _host_noise(other, summaries))
        summaries[result["id"]]["versus"] = {
            "reference": other["id"],
            "target": other["target"],
            "same_device_kind": _same_kind_and_software(result["target"], other["target"], targets),
            "how": "paired" if result["host"] == other["host"] else "unpaired",
            **asdict(ratio),
            "noise": noise,
            "verdict": str(statistics.verdict(ratio, noise, is_significant, _usable(result) and _usable(other))),
        }


def _time_s(summary: Data, summaries: dict[str, Data]) -> float | None:
    """Time of a call, from the fastest parts; of a compared result, the reference's time divided by the ratio.

    The ratio compares the same rounds, so rounds in which everything was slow do not affect it.
    """
    if not summary["call_s"]:
        return None
    versus = summary.get("versus")
    if versus is None:
        return float(summary["fastest_part_s"])
    reference_s = _time_s(summaries[versus["reference"]], summaries)
    return None if reference_s is None else float(reference_s / versus["ratio"])


def _usable(result: Data) -> bool:
    before, after = result.get("host_before"), result.get("host_after")
    return not (before and after) or classify(before, after)["class"] != "unusable"


def _same_kind_and_software(one: str, other: str, targets: dict[str, Data]) -> bool:
    """Return whether two targets have the same kind and software: that compares cards, not backends."""
    sides = [targets.get(name, {}) for name in (one, other)]
    return one != other and all(sides[0].get(what) == sides[1].get(what) for what in ("kind", "torch", "versions"))


def _host_noise(result: Data, summaries: dict[str, Data]) -> float:
    """Noise of the A/A control that was measured in the same rounds on the same host."""
    noises = [
        other["noise"]
        for other in summaries.values()
        if other["case"] == result["case"] and other["host"] == result["host"] and other.get("noise") is not None
    ]
    return float(max(noises, default=statistics.MIN_EFFECT))


def _limits(summaries: dict[str, Data], targets: Data) -> None:
    """Add shares of the vendor's peak, and of the rates this device reached in this run's products and copies."""
    for name, target in targets.items():
        of_target = [c for c in summaries.values() if c["target"] == name and c["call_s"]]
        vendor = comparison.vendor_peak(target.get("kind", ""))
        products = {
            precision: _highest_rate(of_target, "flops_per_s", "matmul", precision) for precision in SHORT_OF.values()
        }
        copies = _highest_rate(of_target, "bytes_per_s", "memory-copy")
        for summary in of_target:
            summary["of_peak_flops"] = _share(summary["flops_per_s"], vendor.flops.get(summary["precision"]))
            summary["of_peak_bytes"] = _share(summary["bytes_per_s"], vendor.bytes_per_s)
            summary["of_own_flops"] = _share(summary["flops_per_s"], products.get(summary["precision"]))
            summary["of_own_bytes"] = _share(summary["bytes_per_s"], copies)
        target["own_bytes_per_s"] = copies
        target["own_flops_per_s"] = {precision: rate for precision, rate in products.items() if rate}
        target["peak"] = asdict(vendor)


def _highest_rate(summaries: list[Data], rate: str, workload: str, precision: str = "") -> float | None:
    rates = [c[rate] for c in summaries if c["workload"] == workload and precision in ("", c["precision"])]
    return max(rates, default=None)


def _share(rate: float | None, limit: float | None) -> float | None:
    return rate / limit if rate and limit else None


def _hosts(results: Iterable[Data]) -> list[Data]:
    """Return the worst state of each host over its cases, with the reasons."""
    by_host: dict[str, Data] = {}
    for result in results:
        before, after = result.get("host_before"), result.get("host_after")
        if not before or not after:
            continue
        host = by_host.setdefault(result["host"], {"host": result["host"], "targets": []})
        state = classify(before, after)
        if "class" not in host or _severity(state) > _severity(host):
            host |= state
        host["targets"] += [result["target"]] if result["target"] not in host["targets"] else []
    return list(by_host.values())


def _severity(state: Data) -> tuple[int, float]:
    return ("quiet", "shared", "unusable").index(state["class"]), state["pressure_cpu"] or 0.0


def geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values if value > 0]
    return math.exp(sum(logs) / len(logs)) if logs else None

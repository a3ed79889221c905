"""Texts of a report: verdict per target, quality of the hosts, command that measures a result again."""

import shlex
from typing import Any

from orchestrator.benchmark.results import geometric_mean

Data = dict[str, Any]


def host_trust(summary: Data) -> Data:
    """Return {"class", "noise", "sentence"}: class of the worst host and median noise of the A/A controls."""
    rank = ("quiet", "shared", "unusable")
    worst = max((h["class"] for h in summary["hosts"]), key=rank.index, default="unknown")
    noises = sorted(c["noise"] for c in summary["results"] if c.get("noise") is not None)
    median_noise = noises[len(noises) // 2] if noises else None
    sentence = {
        "quiet": "the hosts had hardly any other load",
        "shared": "a host's processors were contended: small differences may be noise",
        "unusable": "a host was too busy for any comparison",
    }.get(worst, "no target reported its host's load")
    return {"class": worst, "noise": median_noise, "sentence": sentence}


def verdict_strip(summary: Data) -> list[Data]:
    """Return one entry per target: its sentence and the number of results by verdict."""
    return [_verdict_entry(target, summary) for target in summary["targets"]]


def _verdict_entry(target: Data, summary: Data) -> Data:
    results = [result for result in summary["results"] if result["target"] == target["target"]]
    versus = [
        result["versus"]
        for result in results
        if result.get("versus") and result["versus"]["target"] != target["target"]
    ]
    counts = {
        verdict: sum(v["verdict"] == verdict for v in versus)
        for verdict in ("FASTER", "SLOWER", "SAME", "INCONCLUSIVE")
    }
    problems = {
        status: sum(result["status"] == status for result in results)
        for status in ("unsupported", "failed", "wrong", "lost", "skipped")
    }
    return {
        "target": target["target"],
        "sentence": _sentence(versus, counts, summary),
        "counts": counts,
        "problems": {name: count for name, count in problems.items() if count},
        "measured": sum(result["status"] == "measured" for result in results),
    }


def _sentence(versus: list[Data], counts: dict[str, int], summary: Data) -> str:
    if not versus:
        first = summary["targets"][0]["target"]
        return f"the other targets are compared with {first}"
    mean = geometric_mean(v["ratio"] for v in versus)
    verdicts = [
        f"{counts[verdict]} {verdict.lower()}"
        for verdict in ("FASTER", "SLOWER", "SAME", "INCONCLUSIVE")
        if counts[verdict]
    ]
    suffix = "; same kind and software: this compares devices, not backends" if versus[0]["same_device_kind"] else ""
    return f"{mean:.2f}× in the geometric mean of {len(versus)} results: {', '.join(verdicts)}{suffix}"


def command(result: Data, summary: Data) -> str:
    """Command that measures this result again, with its reference."""
    request = summary["request"]
    arguments = ["polyfleet", "benchmark", "run", request.get("entry") or result["case"]]
    first = summary["targets"][0]
    kinds = dict.fromkeys([first.get("kind", ""), result["kind"]])
    arguments += ["--kinds", ",".join(kinds), "--precision", result["precision"], "--level", result["level"]]
    arguments += ["--regime", "hot,cold"] if result["regime"] == "cold" else []
    if result.get("kernels"):
        arguments += ["--kernels", ",".join(dict.fromkeys([*request["kernels"][:1], result["kernels"]]))]
    arguments += ["--scale", "full"] if request.get("scale") == "full" else []
    arguments += ["--seed", str(request["seed"])] if request.get("seed") else []
    arguments += ["--batch-size", str(request["batch_size"])] if request.get("batch_size") else []
    return shlex.join(arguments)


def environment(summary: Data) -> list[tuple[str, list[str], bool]]:
    """Return (name, value on each target, whether they differ): versions, device, driver, timer, threads."""
    targets = summary["targets"]
    rows = [
        ("kind", [target.get("kind", "") for target in targets]),
        ("device", [target.get("device", {}).get("device_name", "") for target in targets]),
        ("driver", [target.get("device", {}).get("driver_version", "") for target in targets]),
        ("torch", [target.get("torch", "") for target in targets]),
        ("emulated", ["yes" if target.get("emulated") else "no" for target in targets]),
        ("threads", [str(target.get("threads", "")) for target in targets]),
        ("timer", [target.get("timer", "") for target in targets]),
        ("timer's own cost", [f"{target.get('timer_overhead_s', 0) * 1e6:.2g} µs" for target in targets]),
        ("energy", [target.get("energy", "") for target in targets]),
    ]
    names = sorted({name for target in targets for name in (target.get("versions") or {})} - {"torch"})
    rows += [(name, [str((target.get("versions") or {}).get(name, "")) for target in targets]) for name in names]
    return [(what, values, len(set(values)) > 1) for what, values in rows if any(values)]

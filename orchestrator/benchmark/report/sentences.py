"""What a run says, in sentences: the verdict strip, the badge of trust, the command that measures a cell again."""

import shlex
from typing import Any

from orchestrator.benchmark.results import geometric_mean

Data = dict[str, Any]


def host_trust(results: Data) -> Data:
    """{"class", "noise", "sentence"}: the worst host, and how far the same was told from the same."""
    rank = ("quiet", "shared", "unusable")
    worst = max((h["class"] for h in results["hosts"]), key=rank.index, default="unknown")
    noises = sorted(c["noise"] for c in results["cells"] if c.get("noise") is not None)
    middle = noises[len(noises) // 2] if noises else None
    sentence = {
        "quiet": "nothing else ran on the hosts to speak of",
        "shared": "the processors of a host were contended: small differences are not told from noise",
        "unusable": "a host was too busy to compare anything on it",
    }.get(worst, "nobody told how busy the hosts were")
    return {"class": worst, "noise": middle, "sentence": sentence}


def verdict_strip(results: Data) -> list[Data]:
    """One entry per column: its sentence, and how many of its cases were told apart."""
    return [_of(column, results) for column in results["columns"]]


def _of(column: Data, results: Data) -> Data:
    cells = [c for c in results["cells"] if c["column"] == column["column"]]
    versus = [c["versus"] for c in cells if c.get("versus") and c["versus"]["column"] != column["column"]]
    counts = {word: sum(v["verdict"] == word for v in versus) for word in ("FASTER", "SLOWER", "SAME", "INCONCLUSIVE")}
    problems = {s: sum(c["status"] == s for c in cells) for s in ("unsupported", "failed", "wrong", "lost", "skipped")}
    return {
        "column": column["column"],
        "sentence": _sentence(versus, counts, results),
        "counts": counts,
        "problems": {name: count for name, count in problems.items() if count},
        "measured": sum(c["status"] == "measured" for c in cells),
    }


def _sentence(versus: list[Data], counts: dict[str, int], results: Data) -> str:
    if not versus:
        first = results["columns"][0]["column"]
        return f"what the others are compared with: {first}"
    mean = geometric_mean(v["ratio"] for v in versus)
    told = [f"{counts[word]} {word.lower()}" for word in ("FASTER", "SLOWER", "SAME", "INCONCLUSIVE") if counts[word]]
    twins = "; the same kind and software: devices are compared, not back ends" if versus[0]["twins"] else ""
    return f"{mean:.2f}× in the geometric mean of {len(versus)} results: {', '.join(told)}{twins}"


def command(cell: Data, results: Data) -> str:
    """What measures this cell again, with its reference."""
    asked = results["request"]
    words = ["polyfleet", "benchmark", "run", asked.get("entry") or cell["case"]]
    first = results["columns"][0]
    kinds = dict.fromkeys([first.get("kind", ""), cell["kind"]])
    words += ["--kinds", ",".join(kinds), "--precision", cell["precision"], "--level", cell["level"]]
    words += ["--regime", "hot,cold"] if cell["regime"] == "cold" else []
    if cell.get("kernels"):
        words += ["--kernels", ",".join(dict.fromkeys([*asked["kernels"][:1], cell["kernels"]]))]
    words += ["--scale", "full"] if asked.get("scale") == "full" else []
    words += ["--seed", str(asked["seed"])] if asked.get("seed") else []
    words += ["--batch-size", str(asked["batch_size"])] if asked.get("batch_size") else []
    return shlex.join(words)


def environment(results: Data) -> list[tuple[str, list[str], bool]]:
    """(what, its value in each column, whether they differ): versions, device, driver, timer, threads."""
    columns = results["columns"]
    rows = [
        ("kind", [c.get("kind", "") for c in columns]),
        ("device", [c.get("device", {}).get("device_name", "") for c in columns]),
        ("driver", [c.get("device", {}).get("driver_version", "") for c in columns]),
        ("torch", [c.get("torch", "") for c in columns]),
        ("emulated", ["yes" if c.get("emulated") else "no" for c in columns]),
        ("threads", [str(c.get("threads", "")) for c in columns]),
        ("timer", [c.get("timer", "") for c in columns]),
        ("timer's own cost", [f"{c.get('timer_overhead_s', 0) * 1e6:.2g} µs" for c in columns]),
        ("energy", [c.get("energy", "") for c in columns]),
    ]
    names = sorted({name for c in columns for name in (c.get("versions") or {})} - {"torch"})
    rows += [(name, [str((c.get("versions") or {}).get(name, "")) for c in columns]) for name in names]
    return [(what, values, len(set(values)) > 1) for what, values in rows if any(values)]

"""The report as Markdown and as CSV."""

import csv
import io
from typing import Any

from orchestrator.benchmark.report import page, sentences
from orchestrator.show.benchmark import TIMES

Data = dict[str, Any]
FIELDS = ("case", "precision", "level", "regime", "kernels", "target",
          "kind", "pool", "status", "reason", "rounds", "time_s",
          "first_call_s", "compile_s", "items_per_s", "flops_per_s", "bytes_per_s", "of_peak_flops", "of_own_flops",
          "of_own_bytes",
          "peak_memory_bytes", "joules_per_item", "price_per_million", "noise")  # fmt: skip


def markdown(summary: Data) -> str:
    targets = [target["target"] for target in summary["targets"]]
    trust = sentences.host_trust(summary)
    lines = [
        f"# Benchmark {summary['run']}",
        f"**{trust['class']}**: {trust['sentence']}.",
        *(f"- **{entry['target']}**: {entry['sentence']}" for entry in sentences.verdict_strip(summary)),
        "",
        "| " + " | ".join(["case", *targets]) + " |",
        "|" + "---|" * (len(targets) + 1),
    ]
    for row in page.heat(summary):
        tiles = [" ".join(filter(None, (tile["time"], tile["text"]))) for tile in row["tiles"]]
        lines.append("| " + " | ".join([_cell(row["case"]), *map(_cell, tiles)]) + " |")
    lines += ["", f"{TIMES}; ▲ faster ▼ slower = same ? inconclusive.", ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def to_csv(summary: Data) -> str:
    """Write one row per result; times in seconds."""
    out = io.StringIO()
    numbers = ("call_s", "single_call_s")
    spread = [f"{name.removesuffix('_s')}_{part}_s" for name in numbers for part in ("median", "low", "high")]
    versus = ("reference", "ratio", "low", "high", "p", "verdict")
    writer = csv.writer(out)
    writer.writerow([*FIELDS, *spread, *(f"versus_{name}" for name in versus), "accuracy_ok", "rms_rel"])
    for result in summary["results"]:
        accuracy = result.get("accuracy") or {}
        writer.writerow([
            *(result.get(name) for name in FIELDS),
            *((result.get(name) or {}).get(part) for name in numbers for part in ("median", "low", "high")),
            *((result.get("versus") or {}).get(name) for name in versus),
            accuracy.get("ok"), accuracy.get("rms_rel"),
        ])  # fmt: skip
    return out.getvalue()

"""The committed table of what Triton's kernels take, sources/resources.json, and the page that shows it."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.errors import UserError
from workers.kernels.parts import triton_table as table
from workers.kernels.resources import (
    DTYPES,
    NUMBERS,
    SOURCES,
    Resources,
    installed,
    launchable,
    major_minor,
    measured,
    source_hashes,
    spilling,
)  # fmt: skip

COMMITTED = SOURCES / "resources.json"
PAGE = Path(__file__).parents[3] / "docs" / "performance" / "kernel-resources.md"
Data = dict[str, Any]
HEAD = """# What Triton's kernels take of a GPU

<!-- Written by `python -m workers.kernels.resources` from workers/kernels/sources/resources.json. -->

Compiled ahead of time by Triton {releases}, without a device: registers a thread and KiB of shared memory a program,
the most of what makes one configuration into different programs (masks, transposed matrices, sizes that are not
multiples of 16). **None spills a register.** Nobody has run them on a GPU yet, and no speed is claimed.

- `polyfleet kernels resources --target sm_90,gfx942` compiles them anew and tells which spill.
  `python -m workers.kernels.resources` writes this page and the table that launches are held to.
- A configuration that is not in the table is not launched on these targets. sm_86, sm_120, gfx1100 and Intel's GPUs are
  not in it: there nothing is refused.
- Clusters need Triton 3.8; before, rows that wide are read twice.
"""


def data_of(rows: Sequence[Resources], before: Data | None = None) -> Data:
    """As sources/resources.json has it, with the lines of `before`, of the same sources, that the table still needs.
    Raises UserError for rows that may not be launched.
    """
    if refused := spilling(rows):
        told = "; ".join(f"{row.target} {row.dtype} {row.config}: {row.refused}" for row in refused[:5])
        raise UserError(f"{len(refused)} configurations may not be launched: {told}", "choose other forms for them")
    new = {(f"{row.target} {row.dtype}", str(row.config)): [getattr(row, name) for name in NUMBERS] for row in rows}
    kept = _lines(before)
    lines: dict[str, dict[str, list[int]]] = {}
    for job in launchable(table.COMMITTED, table.CLUSTERS_SINCE) + launchable(table.COMMITTED, (0, 0)):
        key = f"{job.target} {job.dtype}", str(job.config)
        if key in new or key in kept:
            lines.setdefault(key[0], {})[key[1]] = new[key] if key in new else kept[key]
    releases = sorted({*(before["triton"] if before and kept else ()), *([installed()] if rows else ())})
    return {"triton": releases, "sources": source_hashes(), "lines": lines}


def _lines(before: Data | None) -> dict[tuple[str, str], list[int]]:
    if not before or before["sources"] != source_hashes():
        return {}
    return {(at, config): line for at, lines in before["lines"].items() for config, line in lines.items()}


def page(data: Data) -> str:
    """docs/performance/kernel-resources.md."""
    targets = list(dict.fromkeys(at.split()[0] for at in data["lines"]))
    columns = ("configuration", "values", *targets)
    found = [
        HEAD.format(releases=" and ".join(data["triton"])),
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for dtype in DTYPES:
        lines = {target: data["lines"].get(f"{target} {dtype}", {}) for target in targets}
        for config in sorted({config for line in lines.values() for config in line}):
            cells = (_cell(lines[target].get(config)) for target in targets)
            found.append(f"| {config} | {dtype} | {' | '.join(cells)} |")
    return "\n".join([*found, ""])


def _cell(line: list[int] | None) -> str:
    return "" if line is None else f"{line[0]}, {line[2] / 1024:.3g}"


def write(targets: Sequence[str] = table.COMMITTED) -> None:
    """Compile what the committed table lacks of the present sources, and write it and its page. Lines of clusters are
    of a newer Triton than the others: it is called once with each.
    """
    before = json.loads(COMMITTED.read_text()) if COMMITTED.exists() else None
    known = _lines(before)
    jobs = launchable(targets, major_minor(installed()))
    lacking = [job for job in jobs if (f"{job.target} {job.dtype}", str(job.config)) not in known]
    data = data_of(measured(lacking), before)
    COMMITTED.write_text(_text(data))
    PAGE.write_text(page(data))


def _text(data: Data) -> str:
    """JSON with a line for each configuration."""
    plain = json.dumps(data, indent=1)
    return re.sub(r"\[\s*(\d+),\s*(\d+),\s*(\d+)\s*\]", r"[\1, \2, \3]", plain) + "\n"

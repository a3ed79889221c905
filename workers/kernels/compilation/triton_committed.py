"""The committed table of resources of Triton's kernels, sources/resources.json, and its page in the docs."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.errors import UserError
from workers.kernels.compilation import triton_table as table
from workers.kernels.compilation.resources import (  # fmt: skip
    DTYPES,
    NUMBERS,
    SOURCES,
    KernelResources,
    compile_configurations,
    installed,
    launchable_configurations,
    major_minor,
    refused_rows,
    source_hashes,
)

COMMITTED = SOURCES / "resources.json"
PAGE = Path(__file__).parents[3] / "docs" / "performance" / "kernel-resources.md"
Data = dict[str, Any]
HEAD = """# Resources of the Triton kernels

<!-- Written by `python -m workers.kernels.compilation.resources` from workers/kernels/sources/resources.json. -->

Compiled ahead of time by Triton {releases}, without a device: registers per thread, and KiB of shared memory per
program. Each number is the maximum over the programs of one configuration (with masks, transposed matrices, or sizes
that are not multiples of 16). **None spills a register.** They have not been run on a GPU, so their speed is unknown.

- `polyfleet kernels resources --target sm_90,gfx942` compiles them again and shows which spill.
  `python -m workers.kernels.compilation.resources` writes this page and the table that is checked before a launch.
- A configuration that is not in the table is not launched on these targets. sm_86, sm_120, gfx1100 and Intel's GPUs are
  not in it: on them nothing is refused.
- Clusters need Triton 3.8; older versions read rows of that width twice.
- Intel: triton-xpu 3.3.0b1 compiled all 149 configurations of its target in float32 and bfloat16 to SPIR-V for PVC, the
  first program of each, on 2026-11-28, with its search for SYCL's headers replaced. They need at most 64 KiB of shared
  memory. SPIR-V states no registers, so spills were not measured.
"""
OLDER_HEAD = """
## Triton {release}

The version of torch 2.8, for {targets}. Of {count} configurations {refused} spill registers or
need more than the target has, and {failed} do not compile. With this version their launch is refused. For other
targets, the lines above are used.

"""


def data_of(rows: Sequence[KernelResources], before: Data | None = None) -> Data:
    """Return the content of sources/resources.json, including lines of `before`, if it is of the same sources, that the
    table still needs. Raises UserError for rows that must not be launched.
    """
    if refused := refused_rows(rows):
        examples = "; ".join(f"{row.target} {row.dtype} {row.config}: {row.refused}" for row in refused[:5])
        raise UserError(
            f"{len(refused)} configurations must not be launched: {examples}", "choose other configurations"
        )
    new = {(f"{row.target} {row.dtype}", str(row.config)): [getattr(row, name) for name in NUMBERS] for row in rows}
    retained = _lines(before)
    lines: dict[str, dict[str, list[int]]] = {}
    for job in launchable_configurations(table.COMMITTED, table.CLUSTERS_SINCE) + launchable_configurations(
        table.COMMITTED, (0, 0)
    ):
        key = f"{job.target} {job.dtype}", str(job.config)
        if key in new or key in retained:
            lines.setdefault(key[0], {})[key[1]] = new[key] if key in new else retained[key]
    releases = sorted({*(before["triton"] if before and retained else ()), *([installed()] if rows else ())})
    older = {"older": before["older"]} if before and "older" in before else {}
    return {"triton": releases, "sources": source_hashes(), "lines": lines} | older


def older_data_of(rows: Sequence[KernelResources]) -> Data:
    """Return the lines of an older version of Triton, also those that must not be launched; zeros: does not compile."""
    lines: dict[str, dict[str, list[int]]] = {}
    for row in rows:
        of_target = lines.setdefault(f"{row.target} {row.dtype}", {})
        of_target[str(row.config)] = [getattr(row, name) for name in NUMBERS]
    return {"triton": installed(), "sources": source_hashes(), "lines": lines}


def _lines(before: Data | None) -> dict[tuple[str, str], list[int]]:
    if not before or before["sources"] != source_hashes():
        return {}
    return {(at, config): line for at, lines in before["lines"].items() for config, line in lines.items()}


def page(data: Data) -> str:
    """Return the text of docs/performance/kernel-resources.md."""
    text = HEAD.format(releases=" and ".join(data["triton"])) + "\n" + _table(data["lines"])
    if "older" in data:
        older = data["older"]
        lines = [(table.target(at.split()[0]), line) for at, rows in older["lines"].items() for line in rows.values()]
        numbers = {
            "targets": ", ".join(dict.fromkeys(on.name for on, _ in lines)),
            "count": len(lines),
            "refused": sum(bool(on.refusal_reason(*line)) for on, line in lines),
            "failed": sum(not line[0] for _, line in lines),
        }
        text += OLDER_HEAD.format(release=older["triton"], **numbers) + _table(older["lines"])
    return text


def _table(all_lines: Data) -> str:
    targets = list(dict.fromkeys(at.split()[0] for at in all_lines))
    columns = ("configuration", "values", *targets)
    page_lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for dtype in DTYPES:
        lines = {target: all_lines.get(f"{target} {dtype}", {}) for target in targets}
        for config in sorted({config for line in lines.values() for config in line}):
            cells = (_cell(lines[target].get(config)) for target in targets)
            page_lines.append(f"| {config} | {dtype} | {' | '.join(cells)} |")
    return "\n".join([*page_lines, ""])


def _cell(line: list[int] | None) -> str:
    if line is None:
        return ""
    if not line[0]:
        return "does not compile"
    return f"{line[0]}, {line[2] / 1024:.3g}" + (f", **{line[1]} spilled**" if line[1] else "")


def write(targets: Sequence[str] = table.COMMITTED) -> None:
    """Compile what the committed table lacks for the current sources, and write the table and its page.

    Lines with clusters need a newer Triton than the others, and version 3.4 has lines of its own: run it once with
    each version.
    """
    before = json.loads(COMMITTED.read_text()) if COMMITTED.exists() else None
    if before and major_minor(installed()) < table.OWN_LINES_BEFORE:
        nvidia = [name for name in targets if table.target(name).vendor == "nvidia"]
        jobs = launchable_configurations(nvidia, major_minor(installed()))
        _write(before | {"older": older_data_of(compile_configurations(jobs))})
        return
    existing = _lines(before)
    jobs = launchable_configurations(targets, major_minor(installed()))
    lacking = [job for job in jobs if (f"{job.target} {job.dtype}", str(job.config)) not in existing]
    _write(data_of(compile_configurations(lacking), before))


def _write(data: Data) -> None:
    COMMITTED.write_text(_text(data))
    PAGE.write_text(page(data))


def _text(data: Data) -> str:
    """Format as JSON with one line per configuration."""
    plain = json.dumps(data, indent=1)
    return re.sub(r"\[\s*(\d+),\s*(\d+),\s*(\d+)\s*\]", r"[\1, \2, \3]", plain) + "\n"

"""`make chaos`: every fault on a real fleet, one after the other, and how long it took until work went on.

    python tests/chaos/campaign.py [--seeds 1-20] [--only WORDS] [-o FILE]     # run; WORDS as for pytest's -k
    python tests/chaos/campaign.py --table FILE...                             # docs/reliability.md of what was kept

A seed decides at which moment of the work a fault comes. Each case tells its seed, and keeps its figures whether it
held or not. Exit code 1 when one did not hold.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- Written by tests/chaos/campaign.py --table from these results. -->\n", "<!-- end of table -->\n"
NOT_FIGURES = {"point", "fault", "what", "seed", "load", "outcome", "error"}
Data = dict[str, Any]


def main() -> int:
    given = _arguments()
    if given.table:
        PAGE.write_text(page([json.loads(file.read_text()) for file in given.table]))
        return 0
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from parts import machine

    told: Data = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine.describe(ROOT)}
    told |= {"seeds": given.seeds, "load_before": machine.load()}
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "records"
        kept.touch()
        code = _run(given, kept)
        records = [json.loads(line) for line in kept.read_text().splitlines()]
    told |= {"load_after": machine.load(), "records": records}
    if given.output:
        given.output.write_text(json.dumps(told, indent=1) + "\n")
    print("\n".join(table(records)))
    return code


def _run(given: argparse.Namespace, kept: Path) -> int:
    """All of this folder, and what is marked `chaos` beside it."""
    environment = os.environ | {"POLYFLEET_CHAOS_RESULTS": str(kept), "POLYFLEET_CHAOS_SEEDS": given.seeds}
    words = [*(["-k", given.only] if given.only else []), *os.environ.get("PYTEST_ARGUMENTS", "").split()]
    pytest = [sys.executable, "-m", "pytest", "-rA", "--durations=10"]
    runs = [
        [*pytest, str(HERE), "-m", "", *words],
        [*pytest, str(HERE.parent), f"--ignore={HERE}", "-m", "chaos", *words],
    ]
    codes = [subprocess.run(run, cwd=ROOT, env=environment, check=False).returncode for run in runs]
    return int(any(code not in (0, 5) for code in codes))  # 5: nothing of these was asked for


def page(results: list[Data]) -> str:
    """docs/reliability.md with the table of these results."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    lines = table([record for result in results for record in result["records"]])
    return f"{before}{BEGIN}{chr(10).join(lines)}\n{END}{rest.partition(END)[2]}"


def table(records: list[Data]) -> Iterator[str]:
    """One line for each fault and figure."""
    yield "| | fault | outcome | figure | median | worst | n | load |"
    yield "|---|---|---|---|---:|---:|---:|---:|"
    cases: dict[tuple[str, str], list[Data]] = {}
    for record in records:
        cases.setdefault((record["fault"], record["what"]), []).append(record)
    for (fault, what), of_case in sorted(cases.items(), key=lambda item: (int(item[0][0][1:]), item[0][1])):
        held = sum(r["outcome"] == "held" for r in of_case)
        outcome = "held" if held == len(of_case) else f"held {held} of {len(of_case)}"
        loads = [r["load"] for r in of_case]
        load = f"{min(loads):.0f}-{max(loads):.0f}" if len(loads) > 1 else f"{loads[0]:.0f}"
        for name, values in _figures(of_case) or [("", [])]:
            shown = (
                f"{median(values):.1f} s | {max(values):.1f} s | {len(values)}" if values else f" | | {len(of_case)}"
            )
            yield f"| {fault} | {what} | {outcome} | {name} | {shown} | {load} |"


def _figures(of_case: list[Data]) -> list[tuple[str, list[float]]]:
    names = dict.fromkeys(name for record in of_case for name in record if name not in NOT_FIGURES)
    found = [(name, [r[name] for r in of_case if r.get(name) is not None]) for name in names]
    return [(NAMES.get(name, name), values) for name, values in found if values]


NAMES = {
    "recovery_s": "work went on after",
    "back_s": "the server answered again after",
    "placed_s": "placed anew after",
    "stale_s": "stale work after SIGCONT",
    "told_again_s": "told again after",
    "refused_s": "refused after",
    "named_s": "named after",
    "quarantined_s": "quarantined after",
    "told_after_step_back_s": "went on after the step back",
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1", help="one number, or first-last")
    parser.add_argument("--only", default="", help="words that pytest's -k takes")
    parser.add_argument("-o", "--output", type=Path, help="keep the records as JSON")
    parser.add_argument("--table", type=Path, nargs="+", help="write the page of kept records instead")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

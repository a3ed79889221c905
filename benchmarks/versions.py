"""What a change costs: this checkout and another one, a fleet of each on this machine, measured in turn.

    git worktree add ../before COMMIT
    python benchmarks/versions.py ../before [-o FILE] [--rounds N]

Each has its own home, server, head and `cpu` node. A round measures both, the one that begins changes from round to
round; what is told is the median of the rounds' ratios, which drift of a shared machine moves little.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from parts import machine
from parts.helper import Helper
from rich.console import Console
from rich.table import Table

from workers.measurement.statistics import interval

HERE = Path(__file__).parents[1]
CLI = Path(sys.executable).with_name("polyfleet")
WARM_UP = 3
console = Console(stderr=True, highlight=False)
Seconds = dict[str, list[float]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write all numbers here, as JSON")
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    with ExitStack() as fleets:
        before = fleets.enter_context(version(arguments.before.absolute()))
        now = fleets.enter_context(version(HERE))
        seconds = in_turn(before, now, arguments.rounds)
    found = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "before": commit(arguments.before),
        "now": commit(HERE),
        "machine": machine.describe(HERE),
        "load_average": machine.load(),
        "rows": [row(case, *pair) for case, pair in seconds.items()],
    }
    show(found["rows"])
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


@contextmanager
def version(checkout: Path) -> Iterator[Helper]:
    """A fleet of that checkout's code, and a child that measures it."""
    home = tempfile.mkdtemp(prefix="pf-versions-")
    env = os.environ | {"PYTHONPATH": str(checkout), "POLYFLEET_HOME": home}
    try:
        subprocess.run([CLI, "up"], env=env, check=True)
        script = checkout / "benchmarks/parts/one_version.py"  # its own: it knows the names of that version
        with Helper(Path(sys.executable), str(script), env=env) as child:
            yield child
    finally:
        subprocess.run([CLI, "down"], env=env, check=False)
        shutil.rmtree(home, ignore_errors=True)


def in_turn(before: Helper, now: Helper, rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds by case, of both, in the order of rounds."""
    measured: tuple[Seconds, Seconds] = (defaultdict(list), defaultdict(list))
    for number in range(-WARM_UP, rounds):
        sides = list(zip((before, now), measured, strict=True))
        for side, kept in sides if number % 2 else reversed(sides):
            seconds = {f"{what}.{case}": s for what in ("job", "inventory") for case, s in side.ask(what).items()}
            for case, s in seconds.items() if number >= 0 else ():
                kept[case].append(s)
        console.print(f"round {number + 1} of {rounds}", style="dim")
    return {case: (measured[0][case], measured[1][case]) for case in measured[0]}


def row(case: str, before_s: list[float], now_s: list[float]) -> dict[str, Any]:
    """`ratio` 1.05: now takes five hundredths longer."""
    middle, low, high = interval([now / before for before, now in zip(before_s, now_s, strict=True)])
    medians = {"before_s": interval(before_s)[0], "now_s": interval(now_s)[0]}
    return {"case": case, **medians, "ratio": middle, "low": low, "high": high, "samples_s": [before_s, now_s]}


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("what", "before", "now", "now / before", "95 %", box=None)
    for r in rows:
        spread = f"{r['low']:.2f} to {r['high']:.2f}"
        table.add_row(
            r["case"], f"{r['before_s'] * 1e3:.1f} ms", f"{r['now_s'] * 1e3:.1f} ms", f"{r['ratio']:.2f}", spread
        )
    Console().print(table)


def commit(checkout: Path) -> str:
    told = subprocess.run(["git", "-C", checkout, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return told.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())

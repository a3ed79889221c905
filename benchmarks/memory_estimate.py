"""How far `estimate_memory` is from what models really take, each in a fresh process, on the CPU and on XLA's CPU.

    python benchmarks/memory_estimate.py [--xla-python PYTHON] [-o FILE] [--only MODEL ...]

Real is, see parts/peak.py, resident memory; and under XLA also what its compiler assigned to buffers (its memory-usage
report), since resident memory holds the compiler as well. Eager cases run twice: as they are, and with an allocator
told to return freed memory at once (MALLOC_MMAP_THRESHOLD_), which leaves what torch itself holds.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from parts import machine
from rich.console import Console
from rich.table import Table

MODELS, MODES = ("mlp", "resnet50", "gpt2", "bert"), ("inference", "training")
CASE = Path(__file__).parent / "parts" / "peak.py"
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536"}
MIB = 2**20


def main() -> int:
    arguments = parse()
    eager = {} if arguments.xla_alone else {"eager": sys.executable}
    places = eager | ({"xla": str(arguments.xla_python)} if arguments.xla_python else {})
    before, rows = machine.load(), []
    for execution, python in places.items():
        for model in arguments.only or MODELS:
            for mode in MODES:
                rows.append(case(python, model, mode, execution))
                print(shown(rows[-1]), file=sys.stderr, flush=True)
                write(arguments.output, rows, before)
    show(rows)
    return 0


def write(output: Path | None, rows: list[dict[str, Any]], load_before: list[float]) -> None:
    """After every case: a run that is cut short keeps what it has."""
    if output is None:
        return
    found = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(Path.cwd()),
        "load_average": {"before": load_before, "after": machine.load()},
        "rows": rows,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write all numbers here, as JSON")
    parser.add_argument("--xla-python", type=Path, metavar="PYTHON", help="an interpreter that has torch-xla")
    parser.add_argument("--xla-alone", action="store_true", help="leave the eager cases out")
    parser.add_argument("--only", nargs="*", choices=MODELS, help="these models alone")
    return parser.parse_args()


def case(python: str, model: str, mode: str, execution: str) -> dict[str, Any]:
    row: dict[str, Any] = {"model": model, "mode": mode, "execution": execution}
    words = [python, str(CASE), model, mode, execution]
    with tempfile.TemporaryDirectory(prefix="pf-memory-") as dump:
        if execution == "xla":
            flags = {"XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text", "PJRT_DEVICE": "CPU"}
            row |= run(words, flags)
            row["compiled"] = compiled(Path(dump))
        else:
            row |= run(words, {})
            row["returned_at_once"] = run(words, AT_ONCE)["resident"]
    return row


def run(words: list[str], more: dict[str, str]) -> dict[str, Any]:
    env = {**os.environ, "OMP_NUM_THREADS": "2"} | more
    done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=tempfile.gettempdir(), timeout=500)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def compiled(dump: Path) -> int:
    """Bytes of all buffers of the program compiled last, that of a step with every state there."""
    last = max(dump.glob("*memory-usage-report.txt"), key=lambda path: path.name)
    told = re.search(r"Total bytes used: (\d+)", last.read_text())
    assert told, last
    return int(told[1])


def errors(row: dict[str, Any]) -> dict[str, float]:
    """Estimate over real, minus one, by what real is."""
    told = row["estimated"]
    real = {"kept": (told["weights"] + told["optimizer_state"], row["resident"]["kept"])}
    real["peak"] = (told["total"], row["resident"]["peak"])
    if "compiled" in row:
        real["compiled"] = (told["total"], row["compiled"])
    if "returned_at_once" in row:
        real["kept, returned at once"] = (real["kept"][0], row["returned_at_once"]["kept"])
        real["peak, returned at once"] = (told["total"], row["returned_at_once"]["peak"])
    return {name: estimated / measured - 1 for name, (estimated, measured) in real.items()}


def shown(row: dict[str, Any]) -> str:
    off = ", ".join(f"{name} {error:+.0%}" for name, error in errors(row).items())
    return f"{row['execution']} {row['model']} {row['mode']}: {row['estimated']['total'] / MIB:.0f} MiB; {off}"


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("execution", "model", "mode", "estimate, MiB", "real, MiB", "error by what is measured")
    for row in rows:
        off = ", ".join(f"{name} {error:+.0%}" for name, error in errors(row).items())
        total, real = row["estimated"]["total"] / MIB, row["resident"]["peak"] / MIB
        table.add_row(row["execution"], row["model"], row["mode"], f"{total:.0f}", f"{real:.0f}", off)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


if __name__ == "__main__":
    sys.exit(main())

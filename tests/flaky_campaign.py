"""`make flaky`: runs a tier of tests several times, in random order and under load, to find tests that fail sometimes.

    python tests/flaky_campaign.py [--runs 20] [--tier gate] [--seed 1] [-o FILE]

Two busy loops per core run beside each run, and every limit of the tests is three times as long. A run's seed is
printed; POLYFLEET_TESTS_SEED=SEED repeats its order. Each run appends its commit, seconds and failures to FILE. Failed
tests are not repeated. Exit code 1 if a test failed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOOPS_PER_CORE = 2
LOOP = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0))).start()
while True:
    pass
"""
PATIENCE = "3"
FAILED = re.compile(r"^FAILED (?P<test>.+?) \((?P<when>\w+)\): (?P<why>.*)$", re.MULTILINE)
Data = dict[str, Any]


def main() -> int:
    given = _arguments()
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from parts import machine

    kept: Data = {"tier": given.tier, "machine": machine.describe(ROOT), "runs": []}
    if given.output and given.output.exists():
        kept["runs"] = json.loads(given.output.read_text())["runs"]
    new: list[Data] = []
    try:
        for number in range(given.runs):
            new.append(one_run(given.tier, given.seed + number, given.processes))
            print(f"run {number + 1} of {given.runs}: {new[-1]['outcome']}", flush=True)
    except KeyboardInterrupt:
        print("broken off: this run is not counted", file=sys.stderr)
    if given.output:
        given.output.write_text(json.dumps(kept | {"runs": kept["runs"] + new}, indent=1) + "\n")
    print("\n".join(table(new)))
    return int(any(run["failed"] or run["exit_code"] for run in new))


def one_run(tier: str, seed: int, processes: str) -> Data:
    words = [sys.executable, "-m", "pytest", "-q", f"--numprocesses={processes}", "--dist=loadscope", f"--tier={tier}"]
    print(f"POLYFLEET_TESTS_SEED={seed} {' '.join(words[1:])}", flush=True)
    began_s = time.monotonic()
    with tempfile.NamedTemporaryFile("r") as failures, busy():
        settings = {"SEED": str(seed), "RETRY": "no", "FAILURES": failures.name}
        environment = os.environ | {f"POLYFLEET_TESTS_{name}": value for name, value in settings.items()}
        environment |= {"POLYFLEET_TEST_PATIENCE": PATIENCE}
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        failed = [match.groupdict() for match in FAILED.finditer(failures.read())]
    if done.returncode:
        print(done.stdout[-5000:], done.stderr[-2000:])
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "seed": seed,
        "seconds": round(time.monotonic() - began_s),
        "exit_code": done.returncode,
        "outcome": done.stdout.strip().rpartition("\n")[2].strip("= "),
        "failed": failed,
    }


@contextmanager
def busy() -> Iterator[None]:
    """Loops that end with their standard input, if this process is killed."""
    loops = [
        subprocess.Popen([sys.executable, "-c", LOOP], stdin=subprocess.PIPE)
        for _ in range(LOOPS_PER_CORE * len(os.sched_getaffinity(0)))
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.communicate()


def table(runs: list[Data]) -> Iterator[str]:
    tests = Counter(test for run in runs for test in {failure["test"] for failure in run["failed"]})
    yield f"| test | failed of {len(runs)} | assertion |"
    yield "|---|---:|---|"
    for test, count in tests.most_common():
        why = next(failure["why"] for run in runs for failure in run["failed"] if failure["test"] == test)
        yield f"| {test} | {count} | {why.replace('|', '/')} |"
    if not tests:
        yield "| every test passed | 0 | |"


def _commit() -> str:
    words = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--tier", default="gate", choices=("gate", "full"))
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="seed of the first run; each further run adds 1"
    )
    parser.add_argument("--processes", default="auto")
    parser.add_argument("-o", "--output", type=Path, help="append the runs to this JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""`make flaky`: runs a tier of tests several times, in random order and under load, to find tests that fail sometimes.

    python tests/flaky_campaign.py [--runs 20] [--tier gate] [--at-once 1] [--seed 1] [-o FILE] [TESTS...]
    python tests/flaky_campaign.py --runs 0 -o FILE

TESTS are folders and files; without them the whole tier is run. Two busy loops per core run beside the tests, and every
limit of the tests is three times as long. Several runs at once are more load, and take less time in all. A run's seed
is printed; POLYFLEET_TESTS_SEED=SEED repeats its order. Failed tests are not repeated. FILE gets each run when it ends:
commit, machine, seconds, TESTS and failures. A tier can so be run in parts, on several days. The tables at the end are
of all runs in FILE: which tests failed, and how often each file of the tier has been run. Exit code 1 if a run of this
call failed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import TemporaryDirectory
from typing import Any

import tiers

ROOT = Path(__file__).parents[1]
LOOPS_PER_CORE = 2
LOOP = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0))).start()
while True:
    pass
"""
PATIENCE = "3"
POLL_S = 0.2
FILES = ("output", "errors", "failures")
FAILED = re.compile(r"^FAILED (?P<test>.+?) \((?P<when>\w+)\): (?P<why>.*)$", re.MULTILINE)
PASSED, TESTS_FAILED = 0, 1
"""Exit codes of pytest with which all tests were run; 2 to 5: interrupted, an error, or no tests."""
LISTED_FILES = 10
Data = dict[str, Any]


def main() -> int:
    arguments = parse_arguments()
    if missing := [path for path in arguments.tests if not files_of(arguments.tier, [path])]:
        print(f"error: no test of tier {arguments.tier} in {', '.join(missing)}", file=sys.stderr)
        return 2
    data = load_results(arguments.output, arguments.tier)
    number_before = len(data["runs"])
    try:
        for run in run_all(arguments):
            data["runs"].append(run)
            print(f"seed {run['seed']}: {run['outcome']}", flush=True)
            if arguments.output:
                arguments.output.write_text(json.dumps(data, indent=1) + "\n")
    except KeyboardInterrupt:
        print("interrupted: a run that had not ended is not counted", file=sys.stderr)
    print("\n".join([*failure_table(data["runs"]), "", *coverage_table(data["runs"], files_of(arguments.tier, []))]))
    return int(any(run["exit_code"] for run in data["runs"][number_before:]))


def load_results(file: Path | None, tier: str) -> Data:
    data: Data = {"tier": tier, "machine": machine_facts(), "runs": []}
    if file and file.exists():
        stored = json.loads(file.read_text())
        if stored["tier"] != tier:
            raise SystemExit(
                f"error: {file} has runs of tier {stored['tier']}; use another file, or TIER={stored['tier']}"
            )
        data["runs"] = stored["runs"]
    return data


def machine_facts() -> Data:
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    from parts import machine

    return machine.describe(ROOT)


def run_all(arguments: argparse.Namespace) -> Iterator[Data]:
    """Each run when it ends. The next begins then, so that `at_once` of them run."""
    seeds = list(range(arguments.seed, arguments.seed + arguments.runs))
    running: list[Run] = []
    with busy(), TemporaryDirectory() as folder:
        try:
            while seeds or running:
                while seeds and len(running) < arguments.at_once:
                    running.append(Run(arguments, seeds.pop(0), Path(folder)))
                time.sleep(POLL_S)
                ended = [run for run in running if run.process.poll() is not None]
                running = [run for run in running if run not in ended]
                yield from (run.result() for run in ended)
        finally:
            for run in running:
                run.process.kill()
                run.process.wait()


class Run:
    """A run of the tests, from its start. What it prints is in `folder`, in files of its own."""

    def __init__(self, arguments: argparse.Namespace, seed: int, folder: Path) -> None:
        self._arguments, self._seed = arguments, seed
        self._commit = _commit()
        self._output, self._errors, self._failures = (folder / f"{seed}-{name}" for name in FILES)
        self._failures.touch()
        words = [sys.executable, "-m", "pytest", "-q", "--dist=loadscope", f"--numprocesses={arguments.processes}"]
        words += [f"--tier={arguments.tier}", *arguments.tests]
        print(f"POLYFLEET_TESTS_SEED={seed} {' '.join(words[1:])}", flush=True)
        settings = {"SEED": str(seed), "RETRY": "no", "FAILURES": str(self._failures)}
        environment = os.environ | {f"POLYFLEET_TESTS_{name}": value for name, value in settings.items()}
        environment |= {"POLYFLEET_TEST_PATIENCE": PATIENCE}
        self._began_s = time.monotonic()
        with self._output.open("w") as output, self._errors.open("w") as errors:
            self.process = Popen(words, cwd=ROOT, env=environment, stdout=output, stderr=errors)

    def result(self) -> Data:
        """Of a run that has ended, with its last lines printed if it failed."""
        output = self._output.read_text()
        if self.process.returncode:
            print(output[-5000:], self._errors.read_text()[-2000:])
        machine = machine_facts()
        return {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": self._commit,
            "machine": f"{machine['cpu']}, {machine['cores']} cores",
            "tests": self._arguments.tests,
            "seed": self._seed,
            "at_once": self._arguments.at_once,
            "seconds": round(time.monotonic() - self._began_s),
            "exit_code": self.process.returncode,
            "outcome": output.strip().rpartition("\n")[2].strip("= "),
            "failed": parse_failures(self._failures.read_text()),
        }


def parse_failures(text: str) -> list[Data]:
    """Without the path of this clone, because FILE is committed."""
    return [match.groupdict() for match in FAILED.finditer(text.replace(str(ROOT), "."))]


@contextmanager
def busy() -> Iterator[None]:
    """Loops that end with their standard input, if this process is killed."""
    loops = [
        Popen([sys.executable, "-c", LOOP], stdin=PIPE) for _ in range(LOOPS_PER_CORE * len(os.sched_getaffinity(0)))
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.communicate()


def failure_table(runs: list[Data]) -> Iterator[str]:
    """A row for each test that failed, with the number of runs that contained its file."""
    yield "| test | failed | of runs | assertion |"
    yield "|---|---:|---:|---|"
    tests = Counter(test for run in runs for test in {failure["test"] for failure in run["failed"]})
    for test, count in tests.most_common():
        why = next(failure["why"] for run in runs for failure in run["failed"] if failure["test"] == test)
        yield f"| {test} | {count} | {runs_of(test.partition('::')[0], runs)} | {why.replace('|', '/')} |"
    for run in runs:
        if run["exit_code"] and not run["failed"]:
            yield f"| (no test; exit code {run['exit_code']}, seed {run['seed']}) | 1 | 1 | {run['outcome']} |"
    if not any(run["failed"] or run["exit_code"] for run in runs):
        yield f"| every test passed | 0 | {len(runs)} | |"


def coverage_table(runs: list[Data], files: list[str]) -> Iterator[str]:
    """How many files of the tier have been run how often, and which were run least."""
    numbers = {file: runs_of(file, runs) for file in files}
    yield "| runs | files | |"
    yield "|---:|---:|---|"
    for number, count in sorted(Counter(numbers.values()).items()):
        names = [file for file in files if numbers[file] == number]
        more = f" and {count - LISTED_FILES} more" if count > LISTED_FILES else ""
        yield f"| {number} | {count} | {', '.join(names[:LISTED_FILES])}{more} |"
    machines = sorted({run.get("machine", "") for run in runs} - {""})
    yield f"commits: {', '.join(sorted({run['commit'] for run in runs}))}; machines: {'; '.join(machines)}"


def runs_of(file: str, runs: list[Data]) -> int:
    """Runs to their end that contained this file."""
    return sum(run["exit_code"] in (PASSED, TESTS_FAILED) and contains(run.get("tests", []), file) for run in runs)


def contains(tests: list[str], file: str) -> bool:
    return not tests or any(Path(file).is_relative_to(path) for path in tests)


def files_of(tier: str, tests: list[str]) -> list[str]:
    files = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if tiers.tier_of(file) == tier]
    names = [file.relative_to(ROOT).as_posix() for file in files]
    return [name for name in names if contains(tests, name)]


def _commit() -> str:
    words = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", metavar="TESTS", help="folders and files of tests, such as tests/cluster")
    parser.add_argument("--runs", type=int, default=20, help="0: only print the tables of FILE")
    parser.add_argument("--tier", default="gate", choices=("gate", "full"))
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="seed of the first run; each further run adds 1"
    )
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="how many runs are in progress at a time")
    parser.add_argument("--processes", default="auto")
    parser.add_argument("-o", "--output", type=Path, help="append the runs to this JSON file")
    arguments = parser.parse_args()
    arguments.tests = [_relative(path) for path in arguments.tests]
    return arguments


def _relative(path: str) -> str:
    """To the repository: as pytest is started there, and as FILE names it on every machine."""
    absolute = Path(path).absolute()
    return absolute.relative_to(ROOT).as_posix() if absolute.is_relative_to(ROOT) else path


if __name__ == "__main__":
    sys.exit(main())

"""`make chaos`: every fault on a real fleet, one after the other, and how long it took until work went on.

    python tests/chaos/campaign.py [--seeds 1-20] [--only WORDS] [-o FILE]     # run; WORDS as for pytest's -k
    python tests/chaos/campaign.py --resume -o FILE        # only cases that FILE does not say held; it gets them all
    python tests/chaos/campaign.py --table FILE...                             # docs/reliability.md of what was kept

A seed decides at which moment of the work a fault comes. Each case tells its seed, and keeps its figures whether it
held or not; the others follow. What was run is kept however the campaign ends. Exit code 1 when one did not hold.

Outages of the head take minutes in which little happens: they run beside the rest, on a fleet of their own, whose store
is empty at first.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- Written by tests/chaos/campaign.py --table from these results. -->\n", "<!-- end of table -->\n"
OUTAGES = "test_outages_of_the_head.py"
OWN_TESTS = "test_campaign.py"
"""Of the page and of this program: no faults, and the page is older than results that are being made."""
NOT_FIGURES = frozenset(
    ("point", "fault", "what", "seed", "load", "outcome", "error", "case", "injected", "said", "refusal", "commit")
)
Data = dict[str, Any]


def main() -> int:
    given = _arguments()
    if given.table:
        PAGE.write_text(page([json.loads(file.read_text()) for file in given.table]))
        return 0
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs ignore the first, and pytest would too
        signal.signal(number, signal.default_int_handler)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from parts import machine

    told: Data = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine.describe(ROOT)}
    told |= {"seeds": given.seeds, "history": given.history, "load_before": machine.load()}
    resumed = before(given.output) if given.resume and given.output else []
    records, code, began_s, commit = resumed, 1, time.monotonic(), _commit()
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "records"
        kept.touch()
        try:
            code = _run(given, kept, [record["case"] for record in resumed])
        except KeyboardInterrupt:
            print("broken off: the same with --resume does the rest", file=sys.stderr)
        finally:
            made = [json.loads(line) | {"commit": commit} for line in kept.read_text().splitlines()]
            records = resumed + made
            told |= {"took_s": round(time.monotonic() - began_s), "load_after": machine.load(), "records": records}
            if given.output:
                given.output.write_text(json.dumps(told, indent=1) + "\n")
    print("\n".join(table(records)))
    print(summary(records), f"in {told['took_s'] / 60:.0f} min")
    return code


def _commit() -> str:
    """Of the code that was tried: results that were resumed may be of several. "" in an archive."""
    words = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def before(file: Path) -> list[Data]:
    """What is not run again: records of cases of which every fault held."""
    records: list[Data] = json.loads(file.read_text())["records"] if file.exists() else []
    failed = {record["case"] for record in records if record["outcome"] != "held"}
    return [record for record in records if record["case"] not in failed]


def _run(given: argparse.Namespace, kept: Path, left_out: list[str]) -> int:
    """All of this folder, and what is marked `chaos` beside it."""
    settings = {"RESULTS": str(kept), "SEEDS": given.seeds, "HISTORY": str(given.history)}
    environment = os.environ | {f"POLYFLEET_CHAOS_{name}": value for name, value in settings.items()}
    words = [*(["-k", given.only] if given.only else []), *os.environ.get("PYTEST_ARGUMENTS", "").split()]
    words += [f"--deselect={case}" for case in dict.fromkeys(left_out)]
    pytest = [sys.executable, "-m", "pytest", "-rA", "--durations=10"]
    runs = [
        [*pytest, str(HERE), *(f"--ignore={HERE / name}" for name in (OUTAGES, OWN_TESTS)), "--tier=any", *words],
        [*pytest, str(HERE.parent), f"--ignore={HERE}", "--tier=chaos", *words],
    ]
    with tempfile.TemporaryFile("w+") as said:
        alone = environment | {"POLYFLEET_CHAOS_HISTORY": "0"}
        beside = _started([*pytest, str(HERE / OUTAGES), "--tier=any", *words], alone, stdout=said)
        try:
            codes = [_ended(_started(run, environment)) for run in runs]
        except BaseException:
            beside.send_signal(signal.SIGINT)
            raise
        finally:
            codes_beside = _ended(beside)
            said.seek(0)
            print(said.read())
    return int(any(code not in (0, 5) for code in (*codes, codes_beside)))  # 5: nothing of these was asked for


def _started(words: list[str], environment: dict[str, str], **more: Any) -> subprocess.Popen[str]:
    """In a session of its own: an interrupt reaches it once, from us, and then it takes its fleet down."""
    return subprocess.Popen(words, cwd=ROOT, env=environment, start_new_session=True, text=True, **more)


def _ended(process: subprocess.Popen[str]) -> int:
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise


def summary(records: list[Data]) -> str:
    failed = [record for record in records if record["outcome"] != "held"]
    told = "".join(f"\n{r['fault']} {r['what']} (seed {r['seed']}): {r['error'][:300]}" for r in failed)
    return f"{len(records) - len(failed)} of {len(records)} faults held{told}"


def page(results: list[Data]) -> str:
    """docs/reliability.md with the table of these results."""
    first, _, rest = PAGE.read_text().partition(BEGIN)
    lines = table([record for result in results for record in result["records"]])
    return f"{first}{BEGIN}{chr(10).join(lines)}\n{END}{rest.partition(END)[2]}"


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
                f"{median(values):z.1f} s | {max(values):z.1f} s | {len(values)}" if values else f" | | {len(of_case)}"
            )
            yield f"| {fault} | {what} | {outcome} | {name} | {shown} | {load} |"


def _figures(of_case: list[Data]) -> list[tuple[str, list[float]]]:
    names = dict.fromkeys(name for record in of_case for name in record if name not in NOT_FIGURES)
    found = [(name, [r[name] for r in of_case if r.get(name) is not None]) for name in names]
    return [(NAMES.get(name, name), values) for name, values in found if values]


NAMES = {
    "recovery_s": "work went on after",
    "again_s": "work was told of again, from the end of the fault, after",
    "healed_recovery_s": "work went on, from the end of the fault, after",
    "healed_placed_s": "placed anew, from the end of the fault, after",
    "ended_s": "a job that waited had ended, from the end of the fault, after",
    "failed_s": "the job had failed, with its reason, after",
    "back_s": "the server answered again after",
    "placed_s": "placed anew after",
    "stale_s": "stale work after SIGCONT",
    "told_again_s": "told again after",
    "refused_s": "refused after",
    "named_s": "named after",
    "quarantined_s": "quarantined after",
    "gap_s": "without work for",
    "lost_s": "the loss was certain after",
    "accepted_s": "a job was accepted after",
    "accepted_again_s": "a job was accepted again, from the end of the fault, after",
    "told_s": "told after",
    "told_after_step_back_s": "went on after the step back",
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1", help="one number, or first-last")
    parser.add_argument("--only", default="", help="words that pytest's -k takes")
    parser.add_argument(
        "--history", type=int, default=100_000, help="ended jobs in the store before, of ten events each"
    )
    parser.add_argument("--resume", action="store_true", help="leave out cases that held, as the output says")
    parser.add_argument("-o", "--output", type=Path, help="keep the records as JSON")
    parser.add_argument("--table", type=Path, nargs="+", help="write the page of kept records instead")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""The page says what the kept results say."""

import json
from pathlib import Path

import campaign

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_the_table_of_the_page_is_that_of_the_results():
    kept = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("chaos-*.json"))]
    assert kept and campaign.page(kept) == campaign.PAGE.read_text()


def test_a_fault_that_did_not_always_hold_is_told_so():
    first = {"fault": "F1", "what": "a", "seed": 1, "load": 1.0, "outcome": "held", "recovery_s": 2.0}
    other = first | {"seed": 2, "load": 3.0, "outcome": "failed", "recovery_s": 4.0}
    assert list(campaign.table([first, other]))[2:] == [
        "| F1 | a | held 1 of 2 | work went on after | 3.0 s | 4.0 s | 2 | 1-3 |"
    ]

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


def test_a_resumed_campaign_leaves_out_cases_of_which_every_fault_held(tmp_path):
    held = {"fault": "F1", "what": "a", "seed": 1, "load": 1.0, "outcome": "held", "case": "one"}
    half = [held | {"case": "two"}, held | {"case": "two", "outcome": "failed", "error": "late"}]
    file = tmp_path / "kept.json"
    file.write_text(json.dumps({"records": [held, *half]}))
    assert campaign.before(file) == [held]
    assert campaign.before(tmp_path / "absent.json") == []


def test_the_summary_names_what_did_not_hold():
    held = {"fault": "F1", "what": "a", "seed": 1, "load": 1.0, "outcome": "held", "case": "one"}
    failed = held | {"what": "b", "outcome": "failed", "error": "AssertionError: late"}
    assert campaign.summary([held, failed]) == "1 of 2 faults held\nF1 b (seed 1): AssertionError: late"

"""A small seeded run of differential_pickles.py; it runs over 100,000 files by hand."""

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside this file; nothing else is called like them

import differential_pickles as differential

SEED, COUNT = 7, 100


def test_random_state_dicts_are_read_as_torch_reads_them_or_refused_by_name(tmp_path):
    counts, faults = Counter(), []
    for number in range(COUNT):
        path = tmp_path / "file.pt"
        assert differential.write(path, SEED, number)
        theirs, ours = differential.by_torch(path), differential.by_import(path, tmp_path / "root")
        counts["refused" if ours[0] else "equal"] += 1
        if why := differential.fault(theirs, ours):
            faults.append(f"number {number}: {why}")
    assert faults == []
    assert counts["equal"] > COUNT / 2
    assert counts["refused"] > COUNT / 20


def test_the_comparison_sees_what_it_is_there_for():
    path, equal = {"/v": (1, 0, 8), "/w": (2, 8, 16)}, ("tensor", "float32", (2,), b"\0" * 8)
    tied = {"/v": (1, 0, 8), "/w": (1, 0, 8)}
    assert differential.fault(("", equal, path), ("", equal, path)) == ""
    assert "differs" in differential.fault(("", equal, path), ("", (*equal[:3], b"\1" * 8), path))
    assert "share memory" in differential.fault(("", equal, path), ("", equal, tied))
    assert "accepted" in differential.fault(("ValueError: no", None, {}), ("", equal, path))
    assert "without a name" in differential.fault(("", equal, path), ("it cannot be read", None, {}))
    assert differential.fault(("", equal, path), ("value/v is a sparse tensor", None, {})) == ""

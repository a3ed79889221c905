"""Writes digits.npz beside this file from the set that scikit-learn ships, for environments that lack scikit-learn.

The digits: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998,
CC BY 4.0.
"""

import gzip
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np


def read() -> tuple[np.ndarray, np.ndarray]:
    """Pixels (1797, 64) from 0 to 16 and labels (1797,), both uint8, without importing scikit-learn."""
    found = find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("no digits.npz here and no scikit-learn: run prepare_data.py where scikit-learn is installed")
    file = Path(found.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(file, "rt") as f:
        table = np.loadtxt(f, delimiter=",").astype("uint8")
    return table[:, :-1], table[:, -1]


def main(folder: Path) -> Path:
    """Writes `folder`/digits.npz and returns it."""
    pixels, labels = read()
    target = folder / "digits.npz"
    np.savez_compressed(target, pixels=pixels, labels=labels)
    return target


if __name__ == "__main__":
    print(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent))

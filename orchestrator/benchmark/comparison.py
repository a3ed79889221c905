"""Choose each result's reference and compare the two by their rounds. Pure.

A result here is a line of a run, with its samples: {"case", "target" (the target), "host", "precision", "level",
"regime", "id", "blocks": [{"round", "calls", "parts_s", …}], "control_blocks"}.
"""

from collections.abc import Iterable
from typing import Any

from workers.measurement import statistics
from workers.measurement.statistics import Ratio

Data = dict[str, Any]


def find_reference(result: Data, measured: Iterable[Data]) -> Data | None:
    """Find the result to compare with, None for a reference itself.

    It is the same case on the first target that has it, with the same settings, else that target's first settings. On
    that target, it is the first settings. With several kernels, it is the first kernels on the same target.
    """
    of_case = [c for c in measured if c["case"] == result["case"]]
    kernel_variants = [
        c for c in of_case if c["target"] == result["target"] and _settings(c)[:3] == _settings(result)[:3]
    ]
    if kernel_variants and kernel_variants[0]["id"] != result["id"]:
        return kernel_variants[0]
    of_first_target = [c for c in of_case if c["target"] == of_case[0]["target"]]
    equal_settings = [
        c for c in of_first_target if _settings(c) == _settings(result) and c["target"] != result["target"]
    ]
    reference = (equal_settings or of_first_target)[0]
    return None if reference["id"] == result["id"] else reference


def _settings(result: Data) -> tuple[str, str, str, str]:
    return result["precision"], result["level"], result["regime"], result.get("kernels", "")


def compare_results(reference: Data, result: Data) -> Ratio:
    """Compare a result with its reference: paired by round on one host, unpaired on two hosts or with few rounds."""
    a, b = statistics.by_round(reference["blocks"]), statistics.by_round(result["blocks"])
    common = sorted(a.keys() & b.keys())
    if reference["host"] == result["host"] and len(common) >= statistics.MIN_COMMON_ROUNDS:
        return statistics.paired([a[n] for n in common], [b[n] for n in common])
    return statistics.unpaired(list(a.values()), list(b.values()))

"""What switching an execution library costs, and what it changes.

    python benchmarks/library_switching.py [-o FILE] [--rounds 200]

Cost: entering and leaving our context, in turns with torch's own where it has one (torch.backends.<name>.flags), and
with an empty context as the limit. Effect: a small convolution, attention layer and einsum with the library on and off,
each with the proof that it was. One thread.
"""

import argparse
import json
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from parts import machine

from workers.devices import backends
from workers.devices.libraries.effect_check import check_effect
from workers.devices.libraries.registry import LIBRARIES
from workers.measurement.statistics import interval
from workers.measurement.timing import Timer
from workers.measurement.timing_comparison import compare_timings

CALLS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "load_average": {"before": machine.load()},
        "switching_us": {name: cost(name, arguments.rounds) for name in switchable()},
        "effect": {name: effect(name, work) for name, work in workloads().items()},
    }
    found["load_average"]["after"] = machine.load()
    show(found)
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")


def switchable() -> list[str]:
    return [name for name, library in LIBRARIES.items() if library.switch is not None and library.available]


def cost(name: str, rounds: int) -> dict[str, Any]:
    """Microseconds of one enter and leave: [median, low, high]."""
    module = getattr(torch.backends, name)
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {"ours": LIBRARIES[name].disable, "empty": nullcontext}
    if hasattr(module, "flags"):
        ways["torch"] = lambda: module.flags(enabled=False)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        order = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
        for way in order:
            times[way].append(one(ways[way]))
    found: dict[str, Any] = {way: list(interval(values)) for way, values in times.items()}
    if "torch" in ways:
        pairs = zip(times["torch"], times["ours"], strict=True)
        found["torch_over_ours"] = list(interval([a / b for a, b in pairs]))
    return found


def one(way: Callable[[], AbstractContextManager[Any]]) -> float:
    begun = perf_counter()
    for _ in range(CALLS):
        with way():
            pass
    return (perf_counter() - begun) / CALLS * 1e6


def workloads() -> dict[str, Callable[[], Any]]:
    images, kernels = torch.rand(4, 64, 28, 28), torch.rand(64, 64, 3, 3)
    layer = torch.nn.TransformerEncoderLayer(128, 4, 256, batch_first=True).eval()
    tokens, a, b, c = torch.rand(4, 64, 128), torch.rand(256, 256), torch.rand(256, 256), torch.rand(256, 4)
    found: dict[str, Callable[[], Any]] = {
        "mkldnn": lambda: torch.nn.functional.conv2d(images, kernels, padding=1),
        "mha": lambda: layer(tokens),
        "opt_einsum": lambda: torch.einsum("ij,jk,kl->il", a, b, c),
    }
    return {name: work for name, work in found.items() if name in switchable()}


def effect(name: str, work: Callable[[], Any]) -> dict[str, Any]:
    library = LIBRARIES[name]

    def without() -> None:
        with library.disable():
            work()

    with torch.inference_mode():
        raced = compare_timings(without, work, Timer(backends.create("cpu")), rounds=24)
    proofs = {state: check_effect(library, on) for state, on in (("on", True), ("off", False))}
    return {"off_s": raced.first_s, "on_s": raced.second_s, "times_as_fast": raced.ratio,
            "proof": {state: p.evidence for state, p in proofs.items()}}  # fmt: skip


def show(found: dict[str, Any]) -> None:
    print("| library | ours, us | torch's own | empty context | torch over ours |\n|---|---:|---:|---:|---:|")
    for name, told in found["switching_us"].items():
        cell = {way: f"{told[way][0]:.2f}" if way in told else "none" for way in ("ours", "torch", "empty")}
        over = "{:.2f} ({:.2f} to {:.2f})".format(*told["torch_over_ours"]) if "torch_over_ours" in told else ""
        print(f"| {name} | {cell['ours']} | {cell['torch']} | {cell['empty']} | {over} |")
    print("\n| library | off, ms | on, ms | times as fast |\n|---|---:|---:|---:|")
    for name, told in found["effect"].items():
        off, on = (f"{median(told[k]) * 1e3:.3f}" for k in ("off_s", "on_s"))
        print(f"| {name} | {off} | {on} | " + "{:.2f} ({:.2f} to {:.2f}) |".format(*told["times_as_fast"]))


if __name__ == "__main__":
    main()

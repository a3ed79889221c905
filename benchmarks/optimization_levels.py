"""What the optimiser's levels bring on this machine's CPU, against eager float32 and against plain torch.compile.

    python benchmarks/optimization_levels.py [-o FILE] [--models mlp resnet50 gpt2] [--small]
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/optimization_levels.py   # as without AVX-512

The optimiser measures each pass itself, in turns with going on without it. The peer is torch.compile with its defaults
on the same model, raced in the same process against the same eager model. One thread: a second one is noise here.
"""

import argparse
import copy
import json
import os
import tempfile
import warnings
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from models import build
from parts import machine
from torch import nn

from workers import get_optimizer
from workers.devices import backends
from workers.devices.capability.probe_cache import LIMITING_VARIABLES
from workers.measurement.inputs import as_sample
from workers.measurement.timing import Timer
from workers.measurement.timing_comparison import compare_timings
from workers.models.optimizers.trial import make_call
from workers.models.passes.pass_context import PassContext

SIZES = {"mlp": {"batch": 64}, "resnet50": {"batch": 1}, "gpt2": {"batch": 1, "seq": 128}}
TOLERANCE = 0.05


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "cpu": backends.create("cpu").device_name,
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "limits": {name: os.environ[name] for name in LIMITING_VARIABLES if name in os.environ},
        "tolerance": TOLERANCE,
        "load_average": {"before": machine.load()},
        "models": {name: measure(name, arguments.small) for name in arguments.models},
    }
    found["load_average"]["after"] = machine.load()
    print(table(found["models"]))
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--small", action="store_true", help="the same architectures, a thousandth of the work")
    return parser.parse_args()


def measure(name: str, small: bool) -> dict[str, Any]:
    """Levels O1 to O3, and the peer. A home of its own: the machine's history is not ours to fill."""
    model, sample = build(name, small=True) if small else build(name, **SIZES[name])
    with tempfile.TemporaryDirectory() as own:
        os.environ["POLYFLEET_HOME"] = own
        found: dict[str, Any] = {"torch.compile": peer(model, sample)}
        for level in ("O1", "O2", "O3"):
            torch._dynamo.reset()
            begun = perf_counter()
            _, result = get_optimizer("cpu").optimize(model, level, sample, tolerance=TOLERANCE)
            found[level] = {**result.to_dict(), "seconds": perf_counter() - begun}
            print(name, level, json.dumps(found[level]["optimizations_skipped"]), flush=True)
    return found


def peer(model: nn.Module, sample: Any) -> dict[str, Any]:
    work = PassContext(backends.create("cpu"), torch.float32, False, as_sample(sample))
    eager = copy.deepcopy(model).eval()
    compiled = torch.compile(copy.deepcopy(model).eval())
    begun = perf_counter()
    make_call(compiled, work)()
    compile_s = perf_counter() - begun
    raced = compare_timings(make_call(eager, work), make_call(compiled, work), Timer(work.backend))
    return {"latency_before_s": raced.first_s, "latency_after_s": raced.second_s, "speedup": raced.ratio,
            "compile_s": compile_s}  # fmt: skip


def table(models: dict[str, Any]) -> str:
    lines = [
        "| model | level | kept | ms before | ms after | times as fast | error | bytes |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for name, levels in models.items():
        for level, told in levels.items():
            seen = told.get("metrics", told)
            kept = ", ".join(e.partition(":")[0] for e in told.get("optimizations_applied", ["inductor"])[1:] or ["—"])
            kept = "inductor" if level == "torch.compile" else kept
            ms = [f"{seen[k][0] * 1e3:.2f}" for k in ("latency_before_s", "latency_after_s")]
            ratio = "{:.2f} ({:.2f} to {:.2f})".format(*seen["speedup"])
            error = f"{seen['max_rel_error']:.1e}" if "max_rel_error" in seen else ""
            share = (
                f"{seen['model_bytes_after'] / seen['model_bytes_before']:.2f}" if "model_bytes_after" in seen else ""
            )
            lines.append(f"| {name} | {level} | {kept} | {ms[0]} | {ms[1]} | {ratio} | {error} | {share} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""How fast the kernels are, beside torch's operations, torch.compile, and a copy of the same bytes.

    python benchmarks/kernels.py [-o FILE] [--small] [--device cpu] [--kernels cpu] [--threads 1 2] [--rounds 12]

Curves over 1 to 4096 rows and 256 to 131,072 columns, products and attention of a few shapes, backward of what has one.
Every arm runs once per round, in turns and in a shuffled order, in one process; a sample is as many calls as fill
`--sample-ms`. "hot" calls take the same arrays again and again, "cold" ones the next of so many that no cache holds
them. One thread is timed by its CPU time, what it would take alone on the machine; several by the wall clock, a GPU by
events. The copy reads and writes as many bytes as the operation must; results are in new memory in every arm, but the
copy's. torch.compile (default mode, static shapes) is measured at MIDDLE and WIDEST. `calls` in the result is what an
operator's call costs without its computation: kernel_calls.py.
"""

import argparse
import json
import random
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from parts import machine
from parts.kernel_calls import measure_calls
from parts.kernel_works import ATTENTION, PRODUCTS, ROWS, WORKS, Arrays, Work, arrays
from torch import Tensor

from workers import kernels as registry
from workers.measurement.statistics import interval, paired

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROW_COUNTS, COLUMN_COUNTS = (1, 16, 64, 256, 1024, 4096), (256, 1024, 4096, 16384, 65536, 131072)
MIDDLE = (256, 4096)
WIDEST = (64, 131072)
COLD_BYTES = {"cpu": 128 << 20, "cuda": 256 << 20}
PRODUCT_SHAPES = {
    "matmul": ((64, 64, 64), (256, 1024, 1024)),
    "linear": ((1, 4096, 4096), (64, 1024, 4096), (512, 1024, 1024)),
    "matmul_vec": ((4096, 4096, 0), (257, 1031, 0)),
    "weighted_sum_rows": ((4096, 0, 4096), (257, 0, 1031)),
    "attention": ((1, 8, 8, 64, 64, 64), (1, 8, 2, 512, 512, 128), (1, 16, 4, 1, 2048, 128)),
    "causal": ((1, 8, 8, 512, 512, 64), (1, 8, 2, 1024, 1024, 128)),
}
SMALL = {"rmsnorm": (8, 256), "swiglu": (8, 256), "matmul_vec": (17, 64, 0), "causal": (1, 2, 1, 9, 9, 16)}
Arm = Callable[[Arrays], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--small", action="store_true", help="a few small shapes, to see that it works")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kernels", nargs="+", default=["cpu"], choices=registry.names())
    parser.add_argument("--only", nargs="+", default=sorted(WORKS), choices=sorted(WORKS))
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=sorted(DTYPES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--sample-ms", type=float, default=2.0)
    parser.add_argument("--without-compile", action="store_true")
    parser.add_argument("--calls-only", action="store_true", help="measure only what a call costs")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    before, rows = machine.load(), []
    made = {name: registry.create(name, arguments.device) for name in arguments.kernels}
    for threads in arguments.threads if arguments.device == "cpu" else [torch.get_num_threads()]:
        torch.set_num_threads(threads)
        torch._dynamo.reset()
        torch._inductor.config.cpp.threads = threads  # part of what a compiled function is kept by
        for case in () if arguments.calls_only else cases(arguments):
            rows.append({"threads": threads, **measured(case, made, arguments)})
            show(rows[-1])
    torch.set_num_threads(1)
    calls = measure_calls(made, arguments.rounds, arguments.device, clocked)
    for call in calls:
        show_call(call)
    found = machine.circumstances(arguments, before) | {
        "torch": torch.__version__,
        "kernels": {name: one.device_info() for name, one in made.items()},
        "calls": calls,
        "rows": rows,
    }
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(found, default=str) + "\n")


def cases(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for dtype in arguments.dtypes:
        for name, shape, way, cache in small() if arguments.small else shapes():
            if name in arguments.only:
                yield {"operation": name, "shape": shape, "dtype": dtype, "way": way, "cache": cache}


def small() -> Iterator[tuple[str, tuple[int, ...], str, str]]:
    for name, shape in SMALL.items():
        yield name, shape, "forward", "hot"
    yield "rmsnorm", SMALL["rmsnorm"], "backward", "hot"
    yield "rmsnorm", SMALL["rmsnorm"], "forward", "cold"


def shapes() -> Iterator[tuple[str, tuple[int, ...], str, str]]:
    curve = dict.fromkeys([(rows, MIDDLE[1]) for rows in ROW_COUNTS] + [(64, columns) for columns in COLUMN_COUNTS])
    for name, work in ROWS.items():
        yield from ((name, shape, "forward", "hot") for shape in curve)
        yield name, MIDDLE, "forward", "cold"
        if work.backward:
            yield from ((name, shape, "backward", "hot") for shape in ((64, 1024), MIDDLE, WIDEST))
    for name in (*PRODUCTS, *ATTENTION):
        yield from ((name, shape, "forward", "hot") for shape in PRODUCT_SHAPES[name])


def measured(case: dict[str, Any], made: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every arm: [median, low, high], and how many times as fast as each peer ours are, paired by rounds."""
    work, dtype = WORKS[case["operation"]], DTYPES[case["dtype"]]
    first = arrays(case["operation"], case["shape"], dtype, arguments.device)
    backward = case["way"] == "backward"
    moved = (work.moved_backward if backward else work.moved) * first[0].nbytes
    compiled = (MIDDLE, *SMALL.values()) if backward else (MIDDLE, WIDEST, *SMALL.values())
    with_compile = not arguments.without_compile and case["shape"] in compiled
    arms = (gradient_arms if backward else forward_arms)(work, made, with_compile)
    half = torch.empty(max(moved // 2, 1), dtype=torch.uint8, device=arguments.device)
    other = torch.empty_like(half)
    copy = lambda *_: other.copy_(half)  # noqa: E731
    arms["copy"] = (lambda _: copy) if backward else copy
    count = max(1, COLD_BYTES[arguments.device.partition(":")[0]] // moved) if case["cache"] == "cold" else 1
    sets = [first, *(tuple(one.clone() for one in first) for _ in range(min(count, 64) - 1))]
    times: dict[str, list[float]] = {name: [] for name in arms}
    calls = {name: one_after_the_other(arm, sets, backward) for name, arm in arms.items()}
    repeats = {name: enough(call, arguments) for name, call in calls.items()}
    for number in range(arguments.rounds):
        order = list(calls)
        random.Random(number).shuffle(order)
        for name in order:
            times[name].append(clocked(calls[name], repeats[name], arguments.device))
    ratios = {
        f"{peer}/{name}": ratio(times[peer], times[name])
        for name in made
        for peer in ("eager", "compile", "copy")
        if peer in times
    }
    seconds = {name: list(interval(values)) for name, values in times.items()}
    found = {"seconds": seconds, "ratios": ratios, "samples_s": times}
    return (
        case | {"bytes": moved} | {key: {name: short(one) for name, one in told.items()} for key, told in found.items()}
    )


def short(values: list[float]) -> list[float]:
    return [float(f"{value:.4g}") for value in values]


def one_after_the_other(arm: Arm, sets: list[Arrays], backward: bool) -> Callable[[], Any]:
    """A call that takes the next arrays each time; a backward has its forward behind it."""
    if backward:
        ready = cycle([arm(given) for given in sets])
        return lambda: next(ready)()
    following = cycle(sets)
    return lambda: arm(next(following))


def ratio(peer: list[float], ours: list[float]) -> list[float]:
    """Above 1 ours is faster: [ratio, low, high]."""
    found = paired(peer, ours)
    return [found.ratio, found.low, found.high]


def forward_arms(work: Work, made: dict[str, Any], with_compile: bool) -> dict[str, Arm]:
    def quiet(call: Callable[..., Any]) -> Arm:
        return torch.inference_mode()(lambda given: call(*given))

    arms: dict[str, Arm] = {"eager": quiet(work.eager)}
    if with_compile:
        arms["compile"] = quiet(torch.compile(work.eager, dynamic=False))
    return arms | {name: (lambda given, one=one: work.ours(one, *given)) for name, one in made.items()}


def gradient_arms(work: Work, made: dict[str, Any], with_compile: bool) -> dict[str, Arm]:
    """Arms that make, of the arrays, a call of the backward alone."""

    def recorded(call: Callable[..., Tensor]) -> Arm:
        def ready(given: Arrays) -> Callable[[], Any]:
            asked = tuple(one.clone().requires_grad_() for one in given[: work.grads])
            result = call(*asked, *given[work.grads :])
            grad = torch.ones_like(result)
            return lambda: torch.autograd.grad(result, asked, grad, retain_graph=True)

        return ready

    def own(kernels: Any) -> Arm:
        def ready(given: Arrays) -> Callable[[], Any]:
            assert work.backward is not None
            return partial(work.backward, kernels, torch.ones_like(given[0]), *given)

        return ready

    arms: dict[str, Arm] = {"eager": recorded(work.eager)}
    if with_compile:
        arms["compile"] = recorded(torch.compile(work.eager, dynamic=False))
    return arms | {name: own(one) for name, one in made.items()}


def enough(call: Callable[[], Any], arguments: argparse.Namespace) -> int:
    """Calls that fill a sample, after one that compiles and one that warms up."""
    call()
    call()
    taken = clocked(call, 1, arguments.device)
    return max(1, min(1000, int(arguments.sample_ms / 1e3 / max(taken, 1e-7))))


def clocked(call: Callable[[], Any], count: int, device: str) -> float:
    """Seconds of one call."""
    if device.startswith("cuda"):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        for _ in range(count):
            call()
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3 / count
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    for _ in range(count):
        call()
    return (clock() - began) / count


def show(row: dict[str, Any]) -> None:
    shape = "x".join(map(str, row["shape"]))
    times = "  ".join(f"{name} {told[0] * 1e6:9.1f}" for name, told in row["seconds"].items())
    ratios = "  ".join(f"{name} {told[0]:5.2f}" for name, told in row["ratios"].items())
    case = f"{row['threads']}t {row['operation']:18s} {row['way']:8s} {row['cache']:4s} {row['dtype']} {shape:18s}"
    print(f"{case} us: {times}  times: {ratios}", flush=True)


def show_call(row: dict[str, Any]) -> None:
    times = "  ".join(f"{name} {told[0] * 1e6:6.2f}" for name, told in row["seconds"].items())
    beyond = "  ".join(
        f"{peer} {told[0] * 1e6:6.2f}" for peers in row["operator_beyond_s"].values() for peer, told in peers.items()
    )
    print(f"call {row['operation']:10s} us: {times}  operator beyond: {beyond}", flush=True)


if __name__ == "__main__":
    main()

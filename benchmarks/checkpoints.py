"""How fast checkpoints are saved and restored, beside what people use, and the limit of this machine.

    python benchmarks/checkpoints.py FOLDER [-o FILE] [--rounds 5] [--gib 2] [--dtypes bf16 fp32]

One transformer's state, live; every arm saves or restores it once per round, in turns and in a shuffled order, in one
process. Wall time is until the data is durable (fsync added where a library does not), CPU seconds are of the process,
peak memory is what the resident set grew by (VmHWM, reset before). "one pass" is `verify="once"`, which hashes while it
fills. "cold" means fsynced and dropped from the guest's page cache. The limits are raw O_DIRECT writes and reads of the
same bytes from two threads, and reads from the page cache.
"""

import argparse
import json
import os
import random
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import safetensors
import torch
import torch.distributed.checkpoint as dcp
from parts import machine
from safetensors.torch import load_file, save_file
from torch import nn

from workers import native
from workers.checkpoint import load, open_checkpoint, save
from workers.checkpoint.conversion import passes
from workers.checkpoint.disk.files import allocate_aligned
from workers.checkpoint.saving.background_saver import BackgroundSaver

CHUNK = 8 << 20
GROUPS = ["saves", "warm", "cold", "opens", "asynchronous", "converts"]
Arm = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--groups", nargs="+", default=GROUPS, choices=GROUPS, help="saves come before all others")
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp32"])
    arguments = parser.parse_args()
    passes.compiled_passes(2**62)  # built before: once on a node, some seconds
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "safetensors": safetensors.__version__,
        "threads": torch.get_num_threads(),
        "compiled": "no: " + missing if (missing := native.unavailable_reason()) else "yes",
        "load_average": {"before": machine.load()},
    }
    for name in arguments.dtypes:
        bench = Bench(arguments.folder / name, {"bf16": torch.bfloat16, "fp32": torch.float32}[name], arguments.gib)
        found[name] = {
            "bytes": bench.bytes,
            "tensors": len(bench.state),
            "arms": bench.run(arguments.rounds, arguments.groups),
        }
        show(name, found[name])
        shutil.rmtree(bench.root, ignore_errors=True)
    found["load_average"]["after"] = machine.load()
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")


def transformer(dtype: torch.dtype, gib: float) -> nn.Module:
    """Layers as TinyLlama's (grouped queries, untied), as many as fill `gib`; a third of the tensors are small."""
    width, hidden, heads, words = 2048, 5632, 256, 32000
    shapes = {
        "q": (width, width), "k": (heads, width), "v": (heads, width), "o": (width, width), "gate": (hidden, width),
        "up": (hidden, width), "down": (width, hidden), "n1": (width,), "n2": (width,),
    }  # fmt: skip
    per_layer = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
    count = max(int((gib * 2**30 - 2 * words * width * dtype.itemsize) / per_layer), 1)
    model = nn.Module()
    model.embed = nn.Parameter(torch.randn(words, width).to(dtype))
    model.layers = nn.ModuleList(
        nn.ParameterDict({name: nn.Parameter(torch.randn(*shape).to(dtype)) for name, shape in shapes.items()})
        for _ in range(count)
    )
    model.head = nn.Parameter(torch.randn(words, width).to(dtype))
    return model


class Bench:
    def __init__(self, root: Path, dtype: torch.dtype, gib: float):
        self.root, self.dtype = root, dtype
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        torch.manual_seed(0)
        self.model = transformer(dtype, gib)
        self.state = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        self.bytes = sum(tensor.nbytes for tensor in self.state.values())
        self.saver = BackgroundSaver()
        self.other: nn.Module | None = None

    def run(self, rounds: int, groups: list[str]) -> dict[str, Any]:
        samples: dict[str, list[dict[str, float]]] = {}
        for group in groups:
            arms = getattr(self, group)()
            for number in range(rounds + 1):
                order = list(arms)
                random.Random(number).shuffle(order)
                for name in order:
                    sample = measured(arms[name])
                    if number:  # the first round warms everybody up
                        samples.setdefault(name, []).append(sample)
        return {name: summary(taken) for name, taken in samples.items()}

    # Saves

    def saves(self) -> dict[str, Callable[[], dict[str, float] | None]]:
        return {
            "save: ours": lambda: self._fresh("ours", lambda p: save(p, 1, {"model": self.model})),
            "save: torch.save": lambda: self._fresh("t.pt", lambda p: (torch.save(self.state, p), synced(p))),
            "save: safetensors": lambda: self._fresh("s.safetensors", lambda p: (save_file(self.state, p), synced(p))),
            "save: DCP": lambda: self._fresh("dcp", lambda p: dcp.save(self.state, checkpoint_id=p, no_dist=True)),
            "save: limit O_DIRECT": lambda: self._fresh("raw", lambda p: raw_write(p, self.bytes)),
        }

    def _fresh(self, name: str, write: Callable[[Path], object]) -> None:
        path = self.root / name
        (shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)) if path.exists() else None
        os.sync()
        with clock():
            write(path)

    # Restores of the same dtype into the live model

    def readers(self, model: nn.Module, kind: str) -> dict[str, Callable[[], None]]:
        live = {name: tensor.detach() for name, tensor in model.state_dict().items()}

        def torch_load() -> None:
            copied(torch.load(self.root / "t.pt", weights_only=True), live)

        def torch_mmap() -> None:
            copied(torch.load(self.root / "t.pt", weights_only=True, mmap=True), live)

        def through_dcp() -> None:
            dcp.load(live, checkpoint_id=self.root / "dcp", no_dist=True)

        return {
            f"{kind}: ours": lambda: load(self.root / "ours", {"model": model}, on_lossy="allow") and None,
            f"{kind}: ours, unverified": lambda: load(
                self.root / "ours", {"model": model}, on_lossy="allow", verify="none"
            ) and None,
            f"{kind}: ours, one pass": lambda: load(
                self.root / "ours", {"model": model}, on_lossy="allow", verify="once"
            ) and None,
            f"{kind}: load_file + copy_": lambda: copied(load_file(self.root / "s.safetensors"), live),
            f"{kind}: torch.load + copy_": torch_load,
            f"{kind}: torch.load(mmap) + copy_": torch_mmap,
            f"{kind}: DCP": through_dcp,
        }  # fmt: skip

    def warm(self) -> dict[str, Callable[[], None]]:
        arms = self.readers(self.model, "warm")
        paths = self.dropped()
        cached = {name: lambda arm=arm: (touched(paths), timed(arm))[1] for name, arm in arms.items()}
        live = [memoryview(t.view(-1).view(torch.uint8).numpy()) for t in self.state.values()]
        return cached | {
            "warm: limit page cache": lambda: (touched(paths), timed(lambda: raw_read_into(paths[0], live)))[1]
        }

    def cold(self) -> dict[str, Callable[[], None]]:
        arms = self.readers(self.model, "cold")
        paths = self.paths()
        dropped = {name: lambda arm=arm: (drop(paths), timed(arm))[1] for name, arm in arms.items()}
        return dropped | {"cold: limit O_DIRECT": lambda: (drop(paths), timed(lambda: raw_read(self.root / "raw")))[1]}

    def converts(self) -> dict[str, Callable[[], None]]:
        target = torch.float32 if self.dtype == torch.bfloat16 else torch.bfloat16
        other = self.model.to(target)
        paths = self.dropped()
        arms = {k: v for k, v in self.readers(other, "convert").items() if "unverified" not in k and "mmap" not in k}
        return {name: lambda arm=arm: (touched(paths), timed(arm))[1] for name, arm in arms.items()}

    def opens(self) -> dict[str, Callable[[], None]]:
        """A fresh dict for reading only, every page of it touched."""

        def ours(verify: str) -> None:
            with open_checkpoint(next((self.root / "ours").glob("step-*")), verify=verify) as opened:
                seen({name: opened.tensor(name) for name in opened.names()})

        paths = self.dropped()
        arms = {
            "open: ours, unverified": lambda: ours("none"),
            "open: ours": lambda: ours("chunks"),
            "open: load_file": lambda: seen(load_file(self.root / "s.safetensors")),
            "open: torch.load(mmap)": lambda: seen(torch.load(self.root / "t.pt", weights_only=True, mmap=True)),
        }
        return {name: lambda arm=arm: (touched(paths), timed(arm))[1] for name, arm in arms.items()}

    def asynchronous(self) -> dict[str, Callable[[], None]]:
        def ours() -> None:
            path = self.root / "async"
            shutil.rmtree(path, ignore_errors=True)
            os.sync()
            with clock() as told:
                saving = self.saver.save(path, 1, {"model": self.model})
                told["blocked_s"] = time.perf_counter() - told["started_s"]
                saving.result()

        def theirs() -> None:
            path = self.root / "dcp_async"
            shutil.rmtree(path, ignore_errors=True)
            os.sync()
            with clock() as told:
                saving = dcp.async_save(self.state, checkpoint_id=path, no_dist=True)
                told["blocked_s"] = time.perf_counter() - told["started_s"]
                saving.result()

        return {"async: ours": ours, "async: DCP async_save": theirs}

    def paths(self) -> list[Path]:
        return [*(self.root / "ours").rglob("*.safetensors"), self.root / "t.pt", self.root / "s.safetensors",
                *(self.root / "dcp").glob("*.distcp"), self.root / "raw"]  # fmt: skip

    def dropped(self) -> list[Path]:
        """All out of the page cache, so that every arm's files come into it again in the same way: how large its parts
        are there decides what a page fault brings, and follows from whoever wrote or read the file last."""
        drop(self.paths())
        return self.paths()


# Measuring

_told: dict[str, float] = {}


class clock:  # noqa: N801 - reads as a word in `with`
    """The part of an arm that counts."""

    def __enter__(self) -> dict[str, float]:
        Path("/proc/self/clear_refs").write_text("5")
        _told.clear()
        _told.update(rss=resident(), cpu=time.process_time(), began_s=time.perf_counter())
        return _told

    def __exit__(self, *_: object) -> None:
        _told["s"] = time.perf_counter() - _told["started_s"]
        _told["cpu_s"] = time.process_time() - _told.pop("cpu")
        _told["peak_bytes"] = max(resident("VmHWM") - _told.pop("rss"), 0)
        del _told["started_s"]


def timed(arm: Arm) -> None:
    with clock():
        arm()


def measured(arm: Arm) -> dict[str, float]:
    arm()
    return dict(_told)


def resident(field: str = "VmRSS") -> float:
    status = Path("/proc/self/status").read_text()
    return float(next(line for line in status.splitlines() if line.startswith(field)).split()[1]) * 1024


def summary(samples: list[dict[str, float]]) -> dict[str, Any]:
    keys = samples[0]
    return {f"median_{key}": median(s[key] for s in samples) for key in keys} | {
        f"all_{key}": [s[key] for s in samples] for key in ("s", *(["blocked_s"] if "blocked_s" in keys else []))
    }


# What the arms do


def copied(loaded: dict[str, torch.Tensor], live: dict[str, torch.Tensor]) -> None:
    for name, tensor in live.items():
        tensor.copy_(loaded[name])


def seen(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.view(torch.uint8).reshape(-1)[::4096].sum()


def synced(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def drop(paths: list[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def touched(paths: list[Path]) -> None:
    """All of it in the page cache; in the order of use is not needed, there is room for all."""
    buffer = memoryview(bytearray(CHUNK))
    for path in paths:
        descriptor, at = os.open(path, os.O_RDONLY), 0
        while count := os.preadv(descriptor, [buffer], at):
            at += count
        os.close(descriptor)


def raw_write(path: Path, size_bytes: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    os.posix_fallocate(descriptor, 0, size_bytes)
    in_two_threads(size_bytes, lambda at, buffer: os.pwrite(descriptor, buffer, at))
    os.fsync(descriptor)
    os.close(descriptor)


def raw_read(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    in_two_threads(os.fstat(descriptor).st_size, lambda at, buffer: os.preadv(descriptor, [buffer], at))
    os.close(descriptor)


def raw_read_into(path: Path, live: list[memoryview]) -> None:
    """Straight into the live tensors, two threads."""
    descriptor, parts, at = os.open(path, os.O_RDONLY), [], 0
    for tensor in live:
        parts += [(at + i, tensor[i : i + CHUNK]) for i in range(0, len(tensor), CHUNK)]
        at += len(tensor)
    todo, lock = iter(parts), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                part = next(todo, None)
            if part is None:
                return
            os.preadv(descriptor, [part[1]], part[0])

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    os.close(descriptor)


_buffers = [allocate_aligned(CHUNK) for _ in range(2)]
for _buffer in _buffers:
    _buffer[:] = os.urandom(CHUNK)


def in_two_threads(size_bytes: int, do: Callable[[int, memoryview], object]) -> None:
    offsets, lock = iter(range(0, size_bytes - size_bytes % 4096, CHUNK)), threading.Lock()

    def work(buffer: memoryview) -> None:
        while True:
            with lock:
                at = next(offsets, None)
            if at is None:
                return
            do(at, buffer)

    workers = [threading.Thread(target=work, args=(buffer,)) for buffer in _buffers]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def show(name: str, found: dict[str, Any]) -> None:
    print(f"\n{name}: {found['bytes'] / 2**30:.2f} GiB in {found['tensors']} tensors")
    for arm, told in found["arms"].items():
        first = arm.partition(":")[0]
        ours = found["arms"][f"{first}: ours"]
        blocked = f" blocked {told['median_blocked_s']:6.2f} s" if "median_blocked_s" in told else ""
        print(
            f"{arm:36s} {told['median_s']:7.3f} s  {found['bytes'] / 1e9 / told['median_s']:6.2f} GB/s  cpu"
            f" {told['median_cpu_s']:6.2f} s  peak {told['median_peak_bytes'] / 2**20:7.0f} MiB"
            f"  {told['median_s'] / ours['median_s']:6.2f} x ours{blocked}"
        )


if __name__ == "__main__":
    main()

"""Random state dicts, read by torch.load(weights_only=True) in a child and by our import: bit for bit the same, or
refused by name. What torch refuses must not be accepted.

    python tests/attacks/differential_pickles.py [--count 100000] [--seed 0] [--first 0]

Number `first` of `seed` is always the same file, so a fault comes back by its number. Exit code 1 when there is one.
"""

import argparse
import collections
import itertools
import multiprocessing
import os
import random
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._tensor import _rebuild_from_type_v2 as rebuild_from_type_v2

from workers.checkpoint import load
from workers.checkpoint.exchange.importer import import_here
from workers.errors import CheckpointError

BATCH = 250
MOST_SHOWN = 20
PLAIN = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.complex32),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu),
)
SIGNED = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
NUMPY = ("f4", "f8", "f2", "i1", "i8", "u2", "c8", "?", ">f4", ">i2")
NAMED = re.compile(r"(value|model)/\w+|storage \d+ is used as")
"""A refusal names what it is about."""
TORCH_CANNOT = "a leaf Variable that requires grad is being used in an in-place operation"
"""torch 2.13 writes tensors of its newer dtypes that require gradients and cannot read them; the numbers are clear."""
CRASHED = "the import ended with"
Draw = random.Random


class Call:
    """Pickled, it is a call of `function` with any arguments, as a forged or older file has it."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self._reduced = (function, arguments)

    def __reduce__(self) -> Any:
        return self._reduced


class Subclass(torch.Tensor):
    """A tensor with a class of its own."""


def _shape(draw: Draw) -> tuple[int, ...]:
    return tuple(
        draw.choice((0, 1, 2, 3, 5)) if draw.random() < 0.1 else draw.randint(1, 4)
        for _ in range(draw.choice((0, 1, 1, 2, 2, 3, 4)))
    )


def _bits(draw: Draw, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Any bits, NaN and denormals among them."""
    count = int(np.prod(shape, dtype=int))
    if not count:
        return torch.empty(shape, dtype=dtype)
    data = bytearray(draw.randbytes(count * dtype.itemsize))
    if dtype == torch.bool:
        data = bytearray(byte & 1 for byte in data)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


def _tensor(draw: Draw) -> torch.Tensor:
    return _bits(draw, draw.choice(PLAIN), _shape(draw))


def _numbers(draw: Draw, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Finite ones: what torch makes of a NaN's sign differs by dtype."""
    made = torch.tensor([draw.gauss(0, 1) for _ in range(2 * int(np.prod(shape, dtype=int)))], dtype=torch.float64)
    return (torch.view_as_complex(made.reshape(-1, 2)) if dtype.is_complex else made[::2]).to(dtype).reshape(shape)


def _view(draw: Draw) -> torch.Tensor:
    dtype = draw.choice(PLAIN)
    base = _bits(draw, dtype, (4, 6))
    return draw.choice((
        lambda: base[1:], lambda: base[:, 1:4], lambda: base.t(), lambda: base[::2, ::3], lambda: base[2, 3],
        lambda: base[:1].expand(3, 6), lambda: base[0, 0].expand(2, 2), lambda: base[1].unsqueeze(1).expand(6, 2),
        lambda: base.as_strided((3, 4), (2, 1), draw.randint(0, 5)), lambda: base.as_strided((4, 6), (1, 4)),
        lambda: base[3:3], lambda: base.reshape(2, 2, 6).permute(2, 0, 1),
    ))()  # fmt: skip


def _marked(draw: Draw) -> torch.Tensor:
    """With the conjugate or the negative bit, or both, and perhaps a view."""
    numbers = _numbers(draw, draw.choice(SIGNED), draw.choice(((), (3,), (2, 3), (700,))))
    if numbers.is_complex() and draw.random() < 0.7:
        numbers = numbers.conj()
        if draw.random() < 0.4:
            numbers = numbers.imag
    if draw.random() < 0.5:
        numbers = torch._neg_view(numbers)
    return numbers.t() if numbers.dim() == 2 and draw.random() < 0.5 else numbers


def _with_grad(draw: Draw) -> Any:
    tensor = _numbers(draw, draw.choice((torch.float32, torch.bfloat16, torch.complex64)), (2, 2))
    parameter = nn.Parameter(tensor, requires_grad=draw.random() < 0.7)
    if draw.random() < 0.3:
        parameter.tensor_model_parallel = True
    return draw.choice((parameter, tensor.clone().requires_grad_(), parameter.data))


def _with_attributes(draw: Draw) -> Any:
    tensor = _numbers(draw, torch.float32, (3,))
    if draw.random() < 0.5:
        tensor = tensor.as_subclass(Subclass)
    else:
        tensor.note = "an attribute"
    return tensor


def _without_place(draw: Draw) -> Any:
    numbers = _numbers(draw, torch.float32, (2, 3))
    return draw.choice((
        lambda: torch.quantize_per_tensor(numbers, 0.1, 3, draw.choice((torch.qint8, torch.quint8, torch.qint32))),
        lambda: torch.quantize_per_channel(numbers, torch.ones(2), torch.zeros(2), 0, torch.qint8),
        lambda: numbers.to_sparse(), lambda: numbers.to_sparse_csr(), lambda: numbers.to("meta"),
        lambda: torch.nested.nested_tensor([numbers[0], numbers[0, :2]]), lambda: numbers.untyped_storage(),
        lambda: bytearray(b"abc"), lambda: numbers.layout,
    ))()  # fmt: skip


def _forged(draw: Draw) -> Any:
    """A rebuild function with arguments that torch.save does not write, or no longer."""
    tensor = _numbers(draw, draw.choice((torch.float32, torch.complex64, torch.int64)), (6,))
    attributes = draw.choice(({}, None, {"a": 1}, ({}, {"b": 2})))
    kind, dtype = draw.choice((torch.Tensor, nn.Parameter)), draw.choice((torch.uint16, torch.float32, None, "float32"))
    storage, u, od = tensor._typed_storage(), torch._utils, collections.OrderedDict
    metadata = draw.choice((
        None, {}, {"conj": True}, {"neg": True}, {"conj": False}, {"neg": 1}, {"other": True}, {1: True},
        {"conj": True, "neg": True}, [], "neg",
    ))  # fmt: skip
    grad, hooks = draw.choice((False, False, True, None, 1)), draw.choice((od(), od(), None, {}, od({1: 2}), 5))
    offset, size, stride = (
        draw.choice((0, 1, 5, -1)),
        draw.choice(((2,), (2, 2), (), (0,), [3], 2)),
        draw.choice(((1,), (0,), (1, 1), (), (3,), (-1,))),
    )
    v2, v3 = u._rebuild_tensor_v2, u._rebuild_tensor_v3
    return draw.choice((
        lambda: Call(v2, storage, 0, (2,), (1,), False, od(), metadata),
        lambda: Call(v2, storage, 1, (3,), (2,), grad, hooks),
        lambda: Call(v2, storage, offset, size, stride, False, od()),
        lambda: Call(v2, storage, 0, (2,), (1,), False, od(), metadata, None),
        lambda: Call(v3, tensor.untyped_storage(), 0, (2,), (1,), grad, hooks, dtype, metadata),
        lambda: Call(v3, tensor.untyped_storage(), 1, (2,), (1,), False, od(), torch.float64),
        lambda: Call(u._rebuild_tensor, storage, 0, torch.Size([2, 3]), (3, 1)),
        lambda: Call(u._rebuild_parameter, tensor, grad, hooks),
        lambda: Call(u._rebuild_parameter_with_state, tensor, False, od(), attributes),
        lambda: Call(rebuild_from_type_v2, v2, kind, (storage, 0, (2,), (1,), False, od()), attributes),
        lambda: Call(torch.Size, [1, 2], [3]),
    ))()  # fmt: skip


def _of_a_device(draw: Draw) -> Any:
    """As torch-xla's tensors were and are written; on the CPU here, for torch.load must read them, too."""
    numbers = _numbers(draw, draw.choice((torch.float32, torch.int64, torch.bfloat16)), draw.choice(((), (3,), (2, 2))))
    said = numbers.dtype if draw.random() < 0.8 else draw.choice(PLAIN)
    wide = numbers.float() if numbers.dtype == torch.bfloat16 else numbers
    if draw.random() < 0.5:
        return Call(torch._utils._rebuild_device_tensor_from_numpy, wide.numpy(), said, "cpu", False)
    return Call(torch._utils._rebuild_device_tensor_from_cpu_tensor, numbers, said, "cpu", draw.random() < 0.2)


def _array(draw: Draw) -> Any:
    kind = np.dtype(draw.choice(NUMPY))
    shape = _shape(draw)
    raw = draw.randbytes(int(np.prod(shape, dtype=int)) * kind.itemsize)
    array = np.frombuffer(bytes(b & 1 for b in raw) if kind.kind == "b" else raw, kind).reshape(shape)
    array = array.copy(order=draw.choice("CF"))
    if draw.random() < 0.3 and array.size:
        return array.reshape(-1)[0]
    return np.array([(1, 2.0)], dtype="i4,f4") if draw.random() < 0.1 else array


def _value(draw: Draw, depth: int = 0) -> Any:
    def inner() -> Any:
        return _value(draw, depth + 1) if depth < 3 else draw.randint(0, 9)

    return draw.choice((
        lambda: draw.randint(-(2**70), 2**70), lambda: draw.gauss(0, 1), lambda: draw.choice((True, False, None)),
        lambda: draw.choice((float("nan"), float("-inf"), -0.0, 5e-324)), lambda: complex(draw.random(), -0.0),
        lambda: draw.choice(("", "text", "a/b", "$tensor", "\u00e9\U0001f600")), lambda: draw.randbytes(5),
        lambda: [inner() for _ in range(3)], lambda: (inner(), inner()), lambda: {1, "a", (2, 3)},
        lambda: {"$x": inner()}, lambda: {"k": inner(), 5: inner(), (1, "t"): 1},
        lambda: collections.OrderedDict(b=inner(), a=1),
        lambda: collections.Counter("aab"), lambda: torch.Size([1, 2]), lambda: draw.choice(PLAIN),
        lambda: torch.device(draw.choice(("cpu", "cuda:1"))),
        lambda: {torch.float32: 1, draw.choice(("float32", "x")): 2},
        lambda: _tensor(draw),
    ))()  # fmt: skip


def _shared(draw: Draw) -> Iterator[Any]:
    """Several tensors of one storage: equal, overlapping, of two dtypes, in and out of order."""
    base = _bits(draw, torch.uint8, (48,))
    if draw.random() < 0.4:
        yield from draw.sample(
            [base, base.view(torch.uint16), base.view(torch.float8_e5m2), base.view(torch.uint16)[3:9], base[5:]], 3
        )
        return
    base = base.view(draw.choice((torch.float32, torch.int16, torch.float64)))
    square = base[:4].reshape(2, 2)
    views = [base, base, base[1:5], base[3:], base[1:5], base[::2], square, square.t(), square.t(), base[:1].expand(3)]
    yield from draw.sample(views, draw.randint(2, 5))


KINDS: tuple[tuple[int, Callable[[Draw], Any]], ...] = (
    (6, _tensor), (6, _view), (4, _marked), (2, _with_grad), (1, _of_a_device), (1, _array), (8, _value),
)  # fmt: skip
RARE: tuple[Callable[[Draw], Any], ...] = (_with_attributes, _without_place, _forged, _forged, _forged, _of_a_device)
"""Most of these are refused, and with them the whole file."""


def state_dict(seed: int, number: int) -> dict[str, Any]:
    draw = Draw(f"{seed} {number}")
    weights, kinds = zip(*KINDS, strict=True)
    value: dict[str, Any] = {"n": number}
    for i in range(draw.randint(1, 5)):
        value[f"v{i}"] = draw.choices(kinds, weights)[0](draw)
    if draw.random() < 0.4:
        value |= {f"s{i}": tensor for i, tensor in enumerate(_shared(draw))}
    if draw.random() < 0.3:
        value["r"] = draw.choice(RARE)(draw)
    model = {f"w{i}": draw.choice((_tensor, _view, _marked))(draw) for i in range(draw.randint(1, 3))}
    if draw.random() < 0.3:
        model["tied"] = model["w0"]
    return {"model": model, "value": value}


def described(value: Any, where: str = "", memory: dict[str, Any] | None = None) -> Any:
    """Plain data that is equal where two values are, to the last bit. `memory`: where tensors lie, by their path."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().resolve_neg()
        if memory is not None and value.numel():
            last = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
            first = value.data_ptr()
            memory[where] = (value.untyped_storage().data_ptr(), first, first + (last + 1) * value.element_size())
        shaped = plain.contiguous().as_strided((plain.numel(),), (1,))  # one element may have any stride
        return "tensor", str(value.dtype), tuple(value.shape), shaped.view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray | np.generic):
        native = np.asarray(value, dtype=value.dtype.newbyteorder("="))
        return type(value).__name__ if value.shape else "scalar", native.dtype.str, value.shape, native.tobytes()
    if isinstance(value, dict):
        items = [(described(k), described(v, f"{where}/{k}", memory)) for k, v in value.items()]
        return type(value).__name__, items
    if isinstance(value, torch.Size | list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return kind, [described(item, f"{where}/{i}", memory) for i, item in enumerate(value)]
    if isinstance(value, set | frozenset):
        return type(value).__name__, sorted(repr(described(item)) for item in value)
    if isinstance(value, torch.dtype):
        return "str", repr(str(value).removeprefix("torch."))
    return ("str", repr(str(value))) if isinstance(value, torch.device) else (type(value).__name__, repr(value))


Answer = tuple[str, Any, dict[str, Any]]
"""What refused it, or ""; what it is; where its tensors lie."""


def _answered(read: Callable[[], Any], expected: tuple[type[BaseException], ...]) -> Answer:
    memory: dict[str, Any] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = read()
            value = {name: dict(sorted(part.items())) for name, part in sorted(value.items())}
            return "", described(value, "", memory), memory
    except expected as e:
        return f"{type(e).__name__}: {e}"[:2000], None, {}


def by_torch(path: Path) -> Answer:
    names = [type(np.dtype(code)) for code in NUMPY] + [np.ndarray, np.dtype, np._core.multiarray.scalar]
    with torch.serialization.safe_globals([*names, np._core.multiarray._reconstruct, torch.Tensor, bytes]):
        return _answered(lambda: torch.load(path, weights_only=True), (Exception,))


def by_import(path: Path, root: Path) -> Answer:
    def read() -> Any:
        state = load(import_here(str(path), str(root))["path"]).state
        for name in [name for name in state if name.startswith("value.")]:  # a dict of tensors is an entry of its own
            state["value"][name.removeprefix("value.")] = state.pop(name)
        return state

    try:
        return _answered(read, (CheckpointError,))
    except Exception as e:
        return f"{CRASHED} {type(e).__name__} {e}", None, {}
    finally:
        shutil.rmtree(root, ignore_errors=True)


def fault(theirs: Answer, ours: Answer) -> str:
    """What is wrong with our answer; "" if nothing is."""
    if ours[0].startswith(CRASHED):
        return ours[0]
    if ours[0]:
        return "" if theirs[0] or NAMED.search(ours[0]) else f"refused without a name: {ours[0]}"
    if TORCH_CANNOT in theirs[0]:
        return ""
    if theirs[0]:
        return f"accepted, and torch.load says {theirs[0][:200]}"
    if ours[1] != theirs[1]:
        return f"differs: torch.load {theirs[1]!r:.1000}\n  import {ours[1]!r:.1000}"
    spans = sorted((first, end, where) for where, (_, first, end) in ours[2].items())
    for (_, end, name), (first, _, other) in itertools.pairwise(spans):
        if first < end and theirs[2][name][0] != theirs[2][other][0]:
            return f"{name} and {other} share memory, and not in torch.load"
    return ""


def write(path: Path, seed: int, number: int) -> bool:
    """Whether torch.save could; it refuses some storages that are shared by two dtypes. Each tenth file is of the
    format before torch 1.6.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.save(state_dict(seed, number), path, _use_new_zipfile_serialization=number % 10 != 9)
        except (RuntimeError, NotImplementedError):
            return False
    return True


def _child(link: Any) -> None:
    torch.set_num_threads(1)
    while paths := link.recv():
        link.send([by_torch(path) for path in paths])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    os.nice(5)
    torch.set_num_threads(1)
    link, theirs_link = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_child, args=(theirs_link,), daemon=True)
    child.start()
    counts: collections.Counter[str] = collections.Counter()
    faults, began_s = [], time.monotonic()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="polyfleet-differential-", dir=memory) as folder:
        for first in range(given.first, given.first + given.count, BATCH):
            numbers = range(first, min(first + BATCH, given.first + given.count))
            written = {n: Path(folder) / f"{n}.pt" for n in numbers if write(Path(folder) / f"{n}.pt", given.seed, n)}
            counts["not written by torch.save"] += len(numbers) - len(written)
            link.send([*written.values()])
            answers = [by_import(path, Path(folder) / "root") for path in written.values()]
            for (number, path), ours, theirs in zip(written.items(), answers, link.recv(), strict=True):
                why = fault(theirs, ours)
                if why:
                    faults.append(f"number {number}: {why}")
                counts[
                    "refused by both" if ours[0] and theirs[0] else "refused by name" if ours[0] else "equal"
                ] += not why
                path.unlink()
            if first % (20 * BATCH) == 0:
                print(f"{first} after {time.monotonic() - began_s:.0f} s", file=sys.stderr)
            if len(faults) >= MOST_SHOWN:
                break
    for line in faults:
        print(line)
    link.send([])
    child.join()
    done = ", ".join(f"{count} {what}" for what, count in counts.items())
    print(f"seed {given.seed}: {done}, {len(faults)} faults in {time.monotonic() - began_s:.0f} s")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

"""Stored bytes into tensors that exist: live parameters, or new ones that nobody has seen yet.

Where nothing has to change, the kernel writes straight into the tensor, from two threads; where only the dtype has to,
compiled code does, if there is any. Everything else (another device, layout, or a part of the tensor) goes through two
small buffers: one is read while the other is put in place. So a load needs its target and some MiB, never the
checkpoint a second time.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from workers.checkpoint.disk.passes import CODES
from workers.checkpoint.disk.reader import CheckpointReader
from workers.checkpoint.format.boxes import Box, full_box
from workers.checkpoint.format.chunks import CHUNK_BYTES
from workers.checkpoint.format.dtypes import dtype_name
from workers.checkpoint.format.manifest import Stored
from workers.checkpoint.format.manifest_checks import box_bytes, box_of
from workers.checkpoint.load_report import ConversionLoss
from workers.checkpoint.state import bits, xla
from workers.checkpoint.state.convert import may_lose, put

THREADS = 2
BUFFER_BYTES = 2 << 20
SETTLE_BYTES = 256 << 20
"""Of XLA tensors whose transfer may be pending: they hold host memory until it is done."""

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class TensorFill:
    """`target` receives the `box` of the stored tensor `name`, by default all of it, multiplied by `factor`."""

    name: str
    target: torch.Tensor
    box: Box | None = None
    factor: float = 1.0

    def part(self, shape: tuple[int, ...]) -> Box:
        return self.box or full_box(shape)


@dataclass(frozen=True, slots=True)
class RowRange:
    """What one read brings: `shape` are whole rows of a shard, of which `inner` goes to `into` of the target."""

    file: str
    offset: int
    bytes: int
    shape: tuple[int, ...]
    inner: tuple[slice, ...]
    into: tuple[slice | int, ...]


def fill(
    reader: CheckpointReader, fills: Iterable[TensorFill], progress: Progress | None = None
) -> dict[str, ConversionLoss]:
    """Carry out all; answers what conversions changed, by stored name. The chunks were proved before, or the reader's
    `settle` proves them after."""
    fills = sorted(fills, key=lambda one: _place(reader, one))
    ways: dict[Callable[..., None], list[TensorFill]] = {_fill_straight: [], _fill_rows: [], _fill_whole: []}
    for one in fills:
        ways[_way(reader, one)].append(one)
    changes: dict[str, ConversionLoss] = {}

    def told(one: TensorFill, change: ConversionLoss, size_bytes: int) -> None:
        changes[one.name] = changes.get(one.name, ConversionLoss()) + change
        if progress is not None:
            progress(size_bytes)

    for way, chosen in ways.items():
        way(reader, chosen, told)
    return changes


def dry_run(reader: CheckpointReader, fills: Iterable[TensorFill]) -> dict[str, ConversionLoss]:
    """What `fill` would change, with nothing put anywhere. Only conversions that may lose are looked at."""
    changes: dict[str, ConversionLoss] = {}

    def told(one: TensorFill, change: ConversionLoss, size_bytes: int) -> None:
        changes[one.name] = changes.get(one.name, ConversionLoss()) + change

    lossy = [f for f in fills if may_lose(reader.entry(f.name).dtype, dtype_name(f.target.dtype))]
    _fill_straight(reader, [f for f in lossy if _converts_straight(reader, f)], told, rehearse=True)
    lossy = [f for f in lossy if not _converts_straight(reader, f)]
    _fill_rows(reader, [f for f in lossy if not reader.entry(f.name).view], told, rehearse=True)
    _fill_whole(reader, [f for f in lossy if reader.entry(f.name).view], told, rehearse=True)
    return changes


def read_new(reader: CheckpointReader, name: str) -> torch.Tensor:
    """A new tensor on the CPU, bit for bit and laid out as it was. Its chunks are proved here."""
    entry = reader.entry(name)
    base = reader.entry(entry.alias_of) if entry.view else entry
    reader.prove(reader.chunks_of(entry.alias_of if entry.view else name))
    tensor = bits.empty(base.shape, bits.torch_dtype(base.dtype), base.layout)
    fill(reader, [TensorFill(entry.alias_of if entry.view else name, tensor)])
    return view_of(tensor, entry.shape, entry.view.strides, entry.view.offset) if entry.view else tensor


def read_elements(reader: CheckpointReader, name: str, start: int, stop: int) -> torch.Tensor:
    """Elements `start` to `stop` in logical order, flat; their chunks were proved before. Of a tensor that lies in
    parts whole rows are read."""
    entry = reader.entry(name)
    dtype = bits.torch_dtype(entry.dtype)
    if entry.view is not None:
        return read_new(reader, name).reshape(-1)[start:stop]
    if len(entry.shards) == 1 and not entry.shards[0].start:
        data = torch.empty((stop - start) * dtype.itemsize, dtype=torch.uint8)
        stored = entry.shards[0]
        reader.read_into(stored.file, stored.offset + start * dtype.itemsize, bits.byte_view(data))
        return data.view(dtype)
    row = math.prod(entry.shape[1:])
    first, last = start // row, -(-stop // row)
    rows = torch.empty((last - first, *entry.shape[1:]), dtype=dtype)
    fill(reader, [TensorFill(name, rows, Box((first, *(0 for _ in entry.shape[1:])), tuple(rows.shape)))])
    return rows.reshape(-1)[start - first * row : stop - first * row]


def view_of(base: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> torch.Tensor:
    """A tensor that shares memory with a contiguous `base`."""
    return base.reshape(-1).as_strided(shape, strides, base.storage_offset() + offset)


Told = Callable[[TensorFill, ConversionLoss, int], None]


def _way(reader: CheckpointReader, one: TensorFill) -> Callable[..., None]:
    """How a target is reached: by the kernel itself, by rows, or through a tensor of its own.

    XLA takes whole tensors, and a view is cut out of the one that is stored.
    """
    entry, target = reader.entry(one.name), one.target
    if entry.view is not None or target.device.type == "xla":
        return _fill_whole
    plain = target.device.type == "cpu" and target.is_contiguous() and not (target.is_conj() or target.is_neg())
    same = dtype_name(target.dtype) == entry.dtype and _is_whole(reader, one)
    return _fill_straight if plain and (same or _converts_straight(reader, one)) else _fill_rows


def _is_whole(reader: CheckpointReader, one: TensorFill) -> bool:
    """All of a tensor that lies in one piece, as it is."""
    entry = reader.entry(one.name)
    return one.factor == 1.0 and len(entry.shards) == 1 and one.part(entry.shape) == box_of(entry, entry.shards[0])


def _converts_straight(reader: CheckpointReader, one: TensorFill) -> bool:
    """Compiled code converts it while it is read, a chunk at a time: no value may lie across two of them."""
    entry, target = reader.entry(one.name), dtype_name(one.target.dtype)
    known = entry.dtype in CODES and target in CODES and entry.dtype != target and entry.view is None
    if not known or not _is_whole(reader, one) or entry.shards[0].offset % bits.torch_dtype(entry.dtype).itemsize:
        return False
    return reader.native is not None


def _place(reader: CheckpointReader, one: TensorFill) -> tuple[str, int]:
    """Files are read from their beginning to their end."""
    entry = reader.entry(one.name)
    return (entry.shards[0].file, entry.shards[0].offset) if entry.shards else ("", 0)


@dataclass(frozen=True, slots=True)
class Part:
    """`bytes` of a file from `offset` on, within a chunk, that belong to `out`; None: they are only counted."""

    one: TensorFill
    file: str
    offset: int
    bytes: int
    out: memoryview | None


def _fill_straight(reader: CheckpointReader, fills: list[TensorFill], told: Told, rehearse: bool = False) -> None:
    def read(parts: list[Part]) -> list[tuple[Part, ConversionLoss]]:
        return [(part, _read_part(reader, part)) for part in parts]

    chunks = _by_chunk(reader, fills, rehearse)
    with ThreadPoolExecutor(THREADS, "read") as pool:
        for parts in pool.map(read, chunks) if len(chunks) > 1 else map(read, chunks):
            for part, change in parts:
                told(part.one, change, part.bytes if part.out is None else len(part.out))


def _read_part(reader: CheckpointReader, part: Part) -> ConversionLoss:
    dtypes = reader.entry(part.one.name).dtype, dtype_name(part.one.target.dtype)
    if dtypes[0] != dtypes[1]:
        return reader.convert_into(part.file, part.offset, part.bytes, dtypes, part.out, may_lose(*dtypes))
    assert part.out is not None
    reader.read_into(part.file, part.offset, part.out)
    return ConversionLoss()


def _by_chunk(reader: CheckpointReader, fills: list[TensorFill], rehearse: bool) -> list[list[Part]]:
    """What is read of each chunk, in order: one thread reads all of it, which a hash takes in order, too."""
    chunks: dict[tuple[str, int], list[Part]] = {}
    for one in fills:
        entry = reader.entry(one.name)
        stored, item, size_bytes = (
            entry.shards[0],
            bits.torch_dtype(entry.dtype).itemsize,
            box_bytes(entry, entry.shards[0]),
        )
        data = None if rehearse else bits.byte_view(bits.movable(one.target))
        at, wide = 0, one.target.element_size()
        while at < size_bytes:
            index = (stored.offset + at) // CHUNK_BYTES
            end = min(size_bytes, (index + 1) * CHUNK_BYTES - stored.offset)
            out = None if data is None else data[at * wide // item : end * wide // item]
            part = Part(one, stored.file, stored.offset + at, end - at, out)
            chunks.setdefault((stored.file, index), []).append(part)
            at = end
    return list(chunks.values())


def _fill_rows(reader: CheckpointReader, fills: list[TensorFill], told: Told, rehearse: bool = False) -> None:
    work = ((one, rows) for one in fills for rows in _rows_of(reader, one))
    for one, rows, data in _read_ahead(reader, work):
        source = data.view(bits.torch_dtype(reader.entry(one.name).dtype)).view(rows.shape)[rows.inner]
        target = one.target[rows.into]
        told(one, copy_scaled(torch.empty_like(target) if rehearse else target, source, one.factor), target.nbytes)


def _fill_whole(reader: CheckpointReader, fills: list[TensorFill], told: Told, rehearse: bool = False) -> None:
    pending_bytes = 0
    for one in fills:
        box = one.part(reader.entry(one.name).shape)
        source = read_new(reader, one.name)[box.slices()]
        host = torch.empty(source.shape, dtype=one.target.dtype)
        told(one, copy_scaled(host, source, one.factor), host.nbytes)
        if rehearse:
            continue
        one.target.copy_(host)
        pending_bytes += host.nbytes if one.target.device.type == "xla" else 0
        if pending_bytes > SETTLE_BYTES:
            xla.wait_device_ops()
            pending_bytes = 0
    if pending_bytes:
        xla.wait_device_ops()


def copy_scaled(target: torch.Tensor, source: torch.Tensor, factor: float, count: bool = True) -> ConversionLoss:
    return put(target, source if factor == 1.0 else source * factor, count)  # by a power of two: exact


def _rows_of(reader: CheckpointReader, one: TensorFill) -> Iterator[RowRange]:
    """The reads that fill the target, shard by shard."""
    entry = reader.entry(one.name)
    item = bits.torch_dtype(entry.dtype).itemsize
    wanted = one.part(entry.shape)
    for stored in entry.shards:
        box = box_of(entry, stored)
        common = box.meets(wanted) if box.count else None
        if common is not None:
            yield from _rows(stored, stored.offset, box.shape, common.within(box), common.within(wanted).start, item)


def _rows(
    stored: Stored, offset: int, shape: tuple[int, ...], part: Box, into: tuple[int, ...], item: int
) -> Iterator[RowRange]:
    """Whole rows of a shard, as many at once as a buffer holds; a row larger than one is split along its own rows."""
    if not shape:
        yield RowRange(stored.file, offset, item, (), (), ())
        return
    row_bytes = item
    for size in shape[1:]:
        row_bytes *= size
    first, count = part.start[0], part.shape[0]
    if row_bytes > BUFFER_BYTES:
        for i in range(count):
            inner = Box(part.start[1:], part.shape[1:])
            for rows in _rows(stored, offset + (first + i) * row_bytes, shape[1:], inner, into[1:], item):
                yield RowRange(rows.file, rows.offset, rows.bytes, rows.shape, rows.inner, (into[0] + i, *rows.into))
        return
    at_once = max(BUFFER_BYTES // row_bytes, 1)
    rest = Box(part.start[1:], part.shape[1:]).slices()
    to_rest = Box(into[1:], part.shape[1:]).slices()
    for i in range(0, count, at_once):
        n = min(at_once, count - i)
        start = offset + (first + i) * row_bytes
        to = slice(into[0] + i, into[0] + i + n)
        yield RowRange(stored.file, start, n * row_bytes, (n, *shape[1:]), (slice(0, n), *rest), (to, *to_rest))


def _read_ahead(
    reader: CheckpointReader, work: Iterable[tuple[TensorFill, RowRange]]
) -> Iterator[tuple[TensorFill, RowRange, torch.Tensor]]:
    """Each read with its bytes; the next one is under way meanwhile, into the other of two buffers."""
    work = list(work)
    largest = max((rows.bytes for _, rows in work), default=0)
    pinned = any(one.target.device.type == "cuda" for one, _ in work)  # transfers to CUDA and ROCm go twice as fast
    buffers = [torch.empty(largest, dtype=torch.uint8, pin_memory=pinned) for _ in work[:2]]

    def read(i: int) -> torch.Tensor:
        rows = work[i][1]
        data = buffers[i % 2][: rows.bytes]
        reader.read_into(rows.file, rows.offset, bits.byte_view(data))
        return data

    with ThreadPoolExecutor(1, "read-ahead") as ahead:
        coming = ahead.submit(read, 0) if work else None
        for i, (one, rows) in enumerate(work):
            data = coming.result() if coming is not None else read(i)
            coming = ahead.submit(read, i + 1) if i + 1 < len(work) else None
            yield one, rows, data

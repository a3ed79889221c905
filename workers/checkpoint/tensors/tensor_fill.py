"""Copy stored bytes into existing tensors: live parameters, or new tensors of this load.

If nothing has to change, the kernel reads straight into the tensor, with two threads. If only the dtype changes,
compiled code does the same, where available. Everything else (another device, layout, or part of the tensor) is
copied through two small buffers: one is read while the other is copied. So a load needs memory for its target and some
MiB, never a second copy of the checkpoint.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from workers.checkpoint.conversion import bits
from workers.checkpoint.conversion.convert import may_lose, put
from workers.checkpoint.conversion.load_report import ConversionLoss
from workers.checkpoint.conversion.passes import CODES
from workers.checkpoint.disk.reader import CheckpointReader
from workers.checkpoint.format.boxes import Box, full_box
from workers.checkpoint.format.dtypes import dtype_name
from workers.checkpoint.format.manifest import CHUNK_BYTES, Stored
from workers.checkpoint.format.manifest_checks import box_bytes, stored_box
from workers.checkpoint.tensors import xla

THREADS = 2
BUFFER_BYTES = 2 << 20
MAX_PENDING_BYTES = 256 << 20
"""Maximum bytes of XLA tensors with pending transfers, which occupy host memory until they are done."""

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class TensorFill:
    """Fill `target` with `box` of the stored tensor `name` (None: all of it), multiplied by `factor`."""

    name: str
    target: torch.Tensor
    box: Box | None = None
    factor: float = 1.0

    def part(self, shape: tuple[int, ...]) -> Box:
        return self.box or full_box(shape)


@dataclass(frozen=True, slots=True)
class RowRange:
    """One read: complete rows of a shard, of `shape`; its part `inner` is copied to `into` of the target."""

    file: str
    offset: int
    bytes: int
    shape: tuple[int, ...]
    inner: tuple[slice, ...]
    into: tuple[slice | int, ...]


def fill(
    reader: CheckpointReader, fills: Iterable[TensorFill], progress: Progress | None = None
) -> dict[str, ConversionLoss]:
    """Fill all targets; return what conversions changed, by stored name.
    The chunks must have been verified before, or the reader's `finish_verification` must be called afterwards.
    """
    fills = sorted(fills, key=lambda tensor_fill: _file_position(reader, tensor_fill))
    methods: dict[Callable[..., None], list[TensorFill]] = {_fill_by_chunk: [], _fill_by_rows: [], _fill_by_tensor: []}
    for tensor_fill in fills:
        methods[_choose_method(reader, tensor_fill)].append(tensor_fill)
    changes: dict[str, ConversionLoss] = {}

    def record_change(tensor_fill: TensorFill, change: ConversionLoss, size_bytes: int) -> None:
        changes[tensor_fill.name] = changes.get(tensor_fill.name, ConversionLoss()) + change
        if progress is not None:
            progress(size_bytes)

    for method, group in methods.items():
        method(reader, group, record_change)
    return changes


def dry_run(reader: CheckpointReader, fills: Iterable[TensorFill]) -> dict[str, ConversionLoss]:
    """Return what `fill` would change, without filling anything. Only conversions that may lose values are computed."""
    changes: dict[str, ConversionLoss] = {}

    def record_change(tensor_fill: TensorFill, change: ConversionLoss, size_bytes: int) -> None:
        changes[tensor_fill.name] = changes.get(tensor_fill.name, ConversionLoss()) + change

    lossy = [f for f in fills if may_lose(reader.entry(f.name).dtype, dtype_name(f.target.dtype))]
    _fill_by_chunk(reader, [f for f in lossy if _converts_by_chunk(reader, f)], record_change, rehearse=True)
    lossy = [f for f in lossy if not _converts_by_chunk(reader, f)]
    _fill_by_rows(reader, [f for f in lossy if not reader.entry(f.name).view], record_change, rehearse=True)
    _fill_by_tensor(reader, [f for f in lossy if reader.entry(f.name).view], record_change, rehearse=True)
    return changes


def read_new(reader: CheckpointReader, name: str) -> torch.Tensor:
    """Read a new tensor on the CPU, bit for bit, in its original memory order. Verifies its chunks."""
    entry = reader.entry(name)
    base = reader.entry(entry.alias_of) if entry.view else entry
    reader.verify_chunks(reader.chunks_of(entry.alias_of if entry.view else name))
    tensor = bits.empty(base.shape, bits.torch_dtype(base.dtype), base.layout)
    fill(reader, [TensorFill(entry.alias_of if entry.view else name, tensor)])
    return view_of(tensor, entry.shape, entry.view.strides, entry.view.offset) if entry.view else tensor


def read_elements(reader: CheckpointReader, name: str, start: int, stop: int) -> torch.Tensor:
    """Read elements `start` to `stop` in logical order, flat; their chunks must have been verified.
    Of a tensor stored in several parts, complete rows are read.
    """
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
    """Return a view of a contiguous `base`."""
    return base.reshape(-1).as_strided(shape, strides, base.storage_offset() + offset)


OnFilled = Callable[[TensorFill, ConversionLoss, int], None]


def _choose_method(reader: CheckpointReader, tensor_fill: TensorFill) -> Callable[..., None]:
    """Choose how a target is filled: read straight into it, by rows, or through a temporary tensor.

    XLA takes only complete tensors, and a view is cut from the tensor that is stored.
    """
    entry, target = reader.entry(tensor_fill.name), tensor_fill.target
    if entry.view is not None or target.device.type == "xla":
        return _fill_by_tensor
    is_plain = target.device.type == "cpu" and target.is_contiguous() and not (target.is_conj() or target.is_neg())
    is_unchanged = dtype_name(target.dtype) == entry.dtype and _is_complete(reader, tensor_fill)
    return _fill_by_chunk if is_plain and (is_unchanged or _converts_by_chunk(reader, tensor_fill)) else _fill_by_rows


def _is_complete(reader: CheckpointReader, tensor_fill: TensorFill) -> bool:
    """Check that the fill takes all of a tensor that is stored in one piece, unscaled."""
    entry = reader.entry(tensor_fill.name)
    return (
        tensor_fill.factor == 1.0
        and len(entry.shards) == 1
        and tensor_fill.part(entry.shape) == stored_box(entry, entry.shards[0])
    )


def _converts_by_chunk(reader: CheckpointReader, tensor_fill: TensorFill) -> bool:
    """Check whether compiled code can convert while reading by chunk: no value may span two chunks."""
    entry, target = reader.entry(tensor_fill.name), dtype_name(tensor_fill.target.dtype)
    is_compiled = entry.dtype in CODES and target in CODES and entry.dtype != target and entry.view is None
    if (
        not is_compiled
        or not _is_complete(reader, tensor_fill)
        or entry.shards[0].offset % bits.torch_dtype(entry.dtype).itemsize
    ):
        return False
    return reader.native is not None


def _file_position(reader: CheckpointReader, tensor_fill: TensorFill) -> tuple[str, int]:
    """Sort key: files are read from start to end."""
    entry = reader.entry(tensor_fill.name)
    return (entry.shards[0].file, entry.shards[0].offset) if entry.shards else ("", 0)


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """`bytes` of a file from `offset` on, within a chunk, for `out`; None: losses are only counted."""

    fill: TensorFill
    file: str
    offset: int
    bytes: int
    out: memoryview | None


def _fill_by_chunk(
    reader: CheckpointReader, fills: list[TensorFill], on_filled: OnFilled, rehearse: bool = False
) -> None:
    def read(parts: list[ChunkRead]) -> list[tuple[ChunkRead, ConversionLoss]]:
        return [(part, _read_part(reader, part)) for part in parts]

    chunks = _parts_by_chunk(reader, fills, rehearse)
    with ThreadPoolExecutor(THREADS, "read") as pool:
        for parts in pool.map(read, chunks) if len(chunks) > 1 else map(read, chunks):
            for part, change in parts:
                on_filled(part.fill, change, part.bytes if part.out is None else len(part.out))


def _read_part(reader: CheckpointReader, part: ChunkRead) -> ConversionLoss:
    dtypes = reader.entry(part.fill.name).dtype, dtype_name(part.fill.target.dtype)
    if dtypes[0] != dtypes[1]:
        return reader.convert_into(part.file, part.offset, part.bytes, dtypes, part.out, may_lose(*dtypes))
    assert part.out is not None
    reader.read_into(part.file, part.offset, part.out)
    return ConversionLoss()


def _parts_by_chunk(reader: CheckpointReader, fills: list[TensorFill], rehearse: bool) -> list[list[ChunkRead]]:
    """Group reads by chunk: one thread reads a chunk completely, because its hash needs the order."""
    chunks: dict[tuple[str, int], list[ChunkRead]] = {}
    for tensor_fill in fills:
        entry = reader.entry(tensor_fill.name)
        stored, item, size_bytes = (
            entry.shards[0],
            bits.torch_dtype(entry.dtype).itemsize,
            box_bytes(entry, entry.shards[0]),
        )
        data = None if rehearse else bits.byte_view(bits.as_integers(tensor_fill.target))
        position, target_item = 0, tensor_fill.target.element_size()
        while position < size_bytes:
            index = (stored.offset + position) // CHUNK_BYTES
            end = min(size_bytes, (index + 1) * CHUNK_BYTES - stored.offset)
            out = None if data is None else data[position * target_item // item : end * target_item // item]
            part = ChunkRead(tensor_fill, stored.file, stored.offset + position, end - position, out)
            chunks.setdefault((stored.file, index), []).append(part)
            position = end
    return list(chunks.values())


def _fill_by_rows(
    reader: CheckpointReader, fills: list[TensorFill], on_filled: OnFilled, rehearse: bool = False
) -> None:
    work = ((tensor_fill, rows) for tensor_fill in fills for rows in _rows_of(reader, tensor_fill))
    for tensor_fill, rows, data in _read_ahead(reader, work):
        source = data.view(bits.torch_dtype(reader.entry(tensor_fill.name).dtype)).view(rows.shape)[rows.inner]
        target = tensor_fill.target[rows.into]
        on_filled(
            tensor_fill,
            copy_scaled(torch.empty_like(target) if rehearse else target, source, tensor_fill.factor),
            target.nbytes,
        )


def _fill_by_tensor(
    reader: CheckpointReader, fills: list[TensorFill], on_filled: OnFilled, rehearse: bool = False
) -> None:
    pending_bytes = 0
    for tensor_fill in fills:
        box = tensor_fill.part(reader.entry(tensor_fill.name).shape)
        source = read_new(reader, tensor_fill.name)[box.slices()]
        host = torch.empty(source.shape, dtype=tensor_fill.target.dtype)
        on_filled(tensor_fill, copy_scaled(host, source, tensor_fill.factor), host.nbytes)
        if rehearse:
            continue
        tensor_fill.target.copy_(host)
        pending_bytes += host.nbytes if tensor_fill.target.device.type == "xla" else 0
        if pending_bytes > MAX_PENDING_BYTES:
            xla.wait_device_ops()
            pending_bytes = 0
    if pending_bytes:
        xla.wait_device_ops()


def copy_scaled(target: torch.Tensor, source: torch.Tensor, factor: float, count: bool = True) -> ConversionLoss:
    # The factor is a power of two, so the product is exact.
    return put(target, source if factor == 1.0 else source * factor, count)


def _rows_of(reader: CheckpointReader, tensor_fill: TensorFill) -> Iterator[RowRange]:
    """Yield the reads that fill the target, shard by shard."""
    entry = reader.entry(tensor_fill.name)
    item = bits.torch_dtype(entry.dtype).itemsize
    requested = tensor_fill.part(entry.shape)
    for stored in entry.shards:
        box = stored_box(entry, stored)
        common = box.intersection(requested) if box.count else None
        if common is not None:
            yield from _rows(
                stored, stored.offset, box.shape, common.relative_to(box), common.relative_to(requested).start, item
            )


def _rows(
    stored: Stored, offset: int, shape: tuple[int, ...], part: Box, into: tuple[int, ...], item: int
) -> Iterator[RowRange]:
    """Yield reads of complete rows, as many as fit a buffer; larger rows are split along their rows."""
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
    rows_per_read = max(BUFFER_BYTES // row_bytes, 1)
    rest = Box(part.start[1:], part.shape[1:]).slices()
    target_rest = Box(into[1:], part.shape[1:]).slices()
    for i in range(0, count, rows_per_read):
        n = min(rows_per_read, count - i)
        start = offset + (first + i) * row_bytes
        target_rows = slice(into[0] + i, into[0] + i + n)
        yield RowRange(
            stored.file, start, n * row_bytes, (n, *shape[1:]), (slice(0, n), *rest), (target_rows, *target_rest)
        )


def _read_ahead(
    reader: CheckpointReader, work: Iterable[tuple[TensorFill, RowRange]]
) -> Iterator[tuple[TensorFill, RowRange, torch.Tensor]]:
    """Yield each read with its bytes, while the next one is read into the other of two buffers."""
    work = list(work)
    largest = max((rows.bytes for _, rows in work), default=0)
    # Pinned memory makes transfers to CUDA and ROCm twice as fast.
    pinned = any(tensor_fill.target.device.type == "cuda" for tensor_fill, _ in work)
    buffers = [torch.empty(largest, dtype=torch.uint8, pin_memory=pinned) for _ in work[:2]]

    def read(i: int) -> torch.Tensor:
        rows = work[i][1]
        data = buffers[i % 2][: rows.bytes]
        reader.read_into(rows.file, rows.offset, bits.byte_view(data))
        return data

    with ThreadPoolExecutor(1, "read-ahead") as pool:
        future = pool.submit(read, 0) if work else None
        for i, (tensor_fill, rows) in enumerate(work):
            data = future.result() if future is not None else read(i)
            future = pool.submit(read, i + 1) if i + 1 < len(work) else None
            yield tensor_fill, rows, data

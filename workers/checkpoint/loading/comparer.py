"""Compare two checkpoints tensor by tensor, with memory for one pair of buffers."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from workers.checkpoint.conversion import bits
from workers.checkpoint.disk.inspect import checkpoint_folder
from workers.checkpoint.disk.reader import CheckpointReader
from workers.checkpoint.format.dtypes import COMPLEX, FLOATS, INTEGERS, dtype_name
from workers.checkpoint.format.manifest import Manifest
from workers.checkpoint.format.wrappers import AmbiguousNamesError, fit
from workers.checkpoint.tensors.tensor_fill import read_elements

Progress = Callable[[int, int], None]
ELEMENTS_PER_PART = 1 << 20
"""Number of elements that are compared at a time."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def diff(
    a: str | Path, b: str | Path, progress: Progress | None = None, *, follow_links: bool = True
) -> dict[str, Any]:
    """Compare two checkpoints and return their differences; every byte read is verified.

    The result is {"a", "b", "same", "equal", "tensors": [row], "only_in_a", "only_in_b", "entries", "names"}.
    A row describes a tensor that differs: "name", "dtype" and "shape" (of both, where they differ). Where values can be
    compared it also has "changed" (their number), "max_abs", "max_rel" and "max_ulp": the greatest distance, counted in
    representable values of the dtype. "equal" is the number of equal tensors. "entries" lists the entries whose trees
    differ. "names" has a sentence for each module whose tensors were compared after removing wrapper names that only
    one side has. `follow_links`: files of both checkpoints may be links.
    """
    folders = (checkpoint_folder(location, follow_links) for location in (a, b))
    with (
        CheckpointReader(next(folders), follow_links) as first,
        CheckpointReader(next(folders), follow_links) as second,
    ):
        names_a, names_b = first.manifest.tensors, second.manifest.tensors
        partners, sentences = _partners(first.manifest, second.manifest)
        common = [name for name in names_a if partners.get(name, name) in names_b]
        total, done, rows, equal = sum(_bytes(first, n) for n in common), 0, [], 0
        for name in common:
            row = _compare_tensor(first, second, name, partners.get(name, name))
            rows += [row] if row else []
            equal += not row
            done += _bytes(first, name)
            if progress is not None:
                progress(done, total)
        only_a = sorted(set(names_a) - set(common))
        only_b = sorted(set(names_b) - {partners.get(name, name) for name in common})
        entries = _entries(first, second)
    return {
        "a": str(first.folder),
        "b": str(second.folder),
        "same": not (rows or only_a or only_b or entries or sentences),
        "equal": equal,
        "tensors": rows,
        "only_in_a": only_a,
        "only_in_b": only_b,
        "entries": entries,
        "names": sentences,
    }


def _partners(a: Manifest, b: Manifest) -> tuple[dict[str, str], list[str]]:
    """Map names in a to those in b for modules with different wrappers, and describe what was stripped."""
    partners: dict[str, str] = {}
    sentences: list[str] = []
    for entry in (e for e in a.entries if e in b.entries and a.entries[e].kind == b.entries[e].kind == "module"):
        tensors_b = {name.removeprefix(f"{entry}/"): name for name in b.module_tensors(entry)}
        try:
            match = fit(
                [name.removeprefix(f"{entry}/") for name in a.module_tensors(entry)],
                tensors_b,
                sides=("first", "second"),
            )
        except AmbiguousNamesError:
            continue
        if match is not None and match.stripped:
            partners |= {f"{entry}/{name}": tensors_b[other] for name, other in match.names.items()}
            sentences.append(f"{entry}: {match.stripped}")
    return partners, sentences


def _entries(first: CheckpointReader, second: CheckpointReader) -> list[str]:
    a, b = first.manifest.entries, second.manifest.entries
    return sorted(name for name in {*a, *b} if name not in a or name not in b or a[name] != b[name])


def _bytes(reader: CheckpointReader, name: str) -> int:
    entry = reader.entry(name)
    return math.prod(entry.shape) * bits.torch_dtype(entry.dtype).itemsize


def _compare_tensor(
    first: CheckpointReader, second: CheckpointReader, name: str, partner: str
) -> dict[str, Any] | None:
    a, b = first.entry(name), second.entry(partner)
    row: dict[str, Any] = {"name": name, "dtype": a.dtype, "shape": list(a.shape)}
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        row |= {"dtype_b": b.dtype, "shape_b": list(b.shape)}
        if a.shape != b.shape or not {a.dtype, b.dtype} <= {*FLOATS, *COMPLEX, *INTEGERS}:
            return row
    difference = _difference(first, second, name, partner)
    if a.dtype == b.dtype and not difference["changed"]:
        return None
    return row | difference


def _difference(first: CheckpointReader, second: CheckpointReader, name: str, partner: str) -> dict[str, Any]:
    changed, max_abs, max_rel, max_ulp = 0, 0.0, 0.0, 0
    for x, y in zip(_parts(first, name), _parts(second, partner), strict=True):
        if x.dtype == y.dtype:
            different = bits.as_integers(x) != bits.as_integers(y)
            if x.dtype.itemsize == 16:
                different = torch.view_as_real(x).view(torch.int64).ne(torch.view_as_real(y).view(torch.int64)).any(-1)
            if not different.any():
                continue
            changed += int(different.sum())
            if not _is_number(x):
                continue
            max_ulp = max(max_ulp, _ulp(x, y))
        wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
        p, q = x.to(wide), y.to(wide)
        if x.dtype != y.dtype:
            changed += int(((p != q) & ~(p.isnan() & q.isnan())).sum())
        error = (p - q).abs()
        finite = error.isfinite()
        relative = (error / p.abs())[finite & (p != 0)]
        max_abs = max(max_abs, float(error[finite].max()) if finite.any() else 0.0)
        max_rel = max(max_rel, float(relative.max()) if relative.numel() else 0.0)
    return {"changed": changed, "max_abs": max_abs, "max_rel": max_rel, "max_ulp": max_ulp}


def _is_number(tensor: torch.Tensor) -> bool:
    return dtype_name(tensor.dtype) in (*FLOATS, *COMPLEX, *INTEGERS)


def _ulp(x: torch.Tensor, y: torch.Tensor) -> int:
    """Greatest distance of two elements in representable values of their dtype; 0 where not defined."""
    if not x.is_floating_point():
        return 0
    kind = _BITS[x.element_size()]
    minimum = torch.iinfo(kind).min
    a, b = (t.view(kind).long() for t in (x, y))
    a, b = (torch.where(t < 0, minimum - t, t) for t in (a, b))  # now the bits sort as the values do
    numbers = ~(x.isnan() | y.isnan())
    return int((a - b).abs()[numbers].max()) if numbers.any() else 0


def _parts(reader: CheckpointReader, name: str) -> Iterator[torch.Tensor]:
    """Yield a tensor's elements in order, flat, ELEMENTS_PER_PART at a time, so that both sides match."""
    entry = reader.entry(name)
    reader.verify_chunks(reader.chunks_of(entry.alias_of if entry.view else name))
    count = math.prod(entry.shape)
    for start in range(0, count, ELEMENTS_PER_PART):
        yield read_elements(reader, reader.manifest.resolve(name), start, min(start + ELEMENTS_PER_PART, count))

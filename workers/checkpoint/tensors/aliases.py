"""Find tensors that share memory: each is stored once, smaller ones as a view of the largest."""

from collections import defaultdict

import torch

from workers.checkpoint.conversion.bits import storage_of
from workers.checkpoint.format.manifest import View


def find_views(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, tuple[str, View]], list[str]]:
    """Map tensors to the one that contains them and how; also return a sentence for each partial overlap.

    Called before anything moves: on another device the memory is no longer shared. XLA's tensors never share memory.
    """
    groups: dict[tuple[int, torch.dtype], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.numel() and type(tensor) in (torch.Tensor, torch.nn.Parameter) and storage_of(tensor):
            groups[storage_of(tensor), tensor.dtype].append(name)
    views: dict[str, tuple[str, View]] = {}
    notes: list[str] = []
    for group in groups.values():
        if len(group) > 1:
            _find_in_group({name: tensors[name] for name in group}, views, notes)
    return views, notes


def _find_in_group(group: dict[str, torch.Tensor], views: dict[str, tuple[str, View]], notes: list[str]) -> None:
    bases: list[str] = []
    for name in sorted(group, key=lambda n: -group[n].numel()):
        first, last = _span(group[name])
        base = next((b for b in bases if _span(group[b])[0] <= first and last <= _span(group[b])[1]), "")
        if base and group[base].is_contiguous() and _same_flags(group[base], group[name]):
            views[name] = (base, View(first - _span(group[base])[0], tuple(group[name].stride())))
            continue
        overlapping = [b for b in bases if first <= _span(group[b])[1] and _span(group[b])[0] <= last]
        notes += [
            f"{name} overlaps {b} in memory; they are stored separately and will not share it" for b in overlapping
        ]
        bases.append(name)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last element in the storage. torch has no negative strides."""
    first = int(tensor.storage_offset())
    return first, first + sum((n - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _same_flags(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.is_conj(), a.is_neg()) == (b.is_conj(), b.is_neg())

"""A checkpoint as torch's users have it: its entries, or the value of the file that it was imported from."""

import argparse
import re
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from workers.checkpoint.exchange.dcp_folders import BESIDE
from workers.checkpoint.exchange.source_form import ROOT_DEPTH
from workers.checkpoint.format import tree
from workers.checkpoint.format.manifest import DamagedCheckpoint, extra_states
from workers.checkpoint.format.optimizer_tree import as_torch, read_optimizer
from workers.checkpoint.lazy_reader import OpenCheckpoint

SINGLE = ("torch", "dcp")
"""Formats whose source is one value; beside that of DCP may lie another."""
_NAME = r"[^\x00-\x1f\x7f/.][^\x00-\x1f\x7f/]{0,254}"
FILE = re.compile(rf"(?:{_NAME}/)?{_NAME}")
"""What a file of an origin may be called: it becomes a name in the folder that an export writes, or in one below it."""


class Values:
    """The values of an open checkpoint; its tensors are mapped from the shards, each once."""

    def __init__(self, opened: OpenCheckpoint):
        self._opened, self._tensors = opened, dict[str, torch.Tensor]()
        self._used: set[str] = set()
        self.origin = opened.manifest.origin

    def entries(self) -> dict[str, Any]:
        """A module as {name: tensor} and its extra states, an optimizer as its state_dict."""
        return {name: self.entry(name) for name in self._opened.manifest.entries}

    def entry(self, name: str) -> Any:
        manifest = self._opened.manifest
        entry, decode = manifest.entries[name], partial(tree.decode, leaf=self._leaf)
        if entry.kind == "module":
            tensors = {n.removeprefix(f"{name}/"): self._tensor(n) for n in manifest.own(name)}
            return tensors | extra_states(entry, decode)
        if entry.kind == "optimizer":
            return as_torch(read_optimizer(name, entry), decode)
        return decode(entry.tree)

    def whole(self) -> Any:
        """What the file held that was imported; of any other checkpoint its entries."""
        if self.origin is None or self.origin.format not in SINGLE:
            return self.entries()
        names = [name for name in self.origin.files if name != BESIDE or self.origin.format != "dcp"]
        return self.file(*names) if len(names) == 1 else self.entries()

    def beside(self) -> Any:
        """What lay beside the whole in a folder of DCP; None where there was nothing."""
        there = self.origin is not None and self.origin.format == "dcp" and BESIDE in self.origin.files
        return self.file(BESIDE) if there else None

    def file(self, name: str) -> Any:
        """What file `name` of the source held. Raises DamagedCheckpoint where its form in the manifest is malformed."""
        assert self.origin is not None
        self._used.clear()
        try:
            return tree.decode(self.origin.files[name], self._leaf, ROOT_DEPTH, self._more)
        except (KeyError, AttributeError) as e:
            raise DamagedCheckpoint(f"the manifest's form of {name!r:.200} is malformed: {e!r:.200}") from None

    def header(self, name: str) -> tuple[str, dict[str, str]]:
        """Of a safetensors file: the module whose tensors it has, and the texts beside them. Raises the same."""
        told = self.file(name)
        entry, texts = (told.get("entry"), told.get("metadata")) if isinstance(told, dict) else (None, None)
        known = type(entry) is str and entry in self._opened.manifest.entries
        if not known or type(texts) is not dict or not all(type(text) is str for text in texts.values()):
            raise DamagedCheckpoint(f"the manifest's form of {name!r:.200} names no module")
        return str(entry), texts

    def names(self) -> list[str]:
        """Files of the source. Raises DamagedCheckpoint for a name that is none in a folder."""
        names = list(self.origin.files) if self.origin else []
        if bad := [name for name in names if not FILE.fullmatch(name)]:
            raise DamagedCheckpoint(f"the manifest has a form of {bad[0]!r:.200}, which is no name of a file")
        return names

    def _more(self, tag: str, content: Any, depth: int) -> Any:
        if tag == "$entry":
            return self._entry_once(content)
        if tag == "$state_dict":
            name, versions = content
            return _module_state(self._entry_once(name), tree.decode(versions, self._leaf, depth, self._more))
        value = tree.decode(content, self._leaf, depth, self._more)
        return _module_state(*value) if tag == "$module_state" else _rebuilt(tag, value)

    def _entry_once(self, name: str) -> Any:
        """A small form could else ask for a large entry a million times."""
        if name in self._used:
            raise ValueError(f"{name!r:.200} stands in it twice")
        self._used.add(name)
        return self.entry(name)

    def _leaf(self, name: str, tag: str) -> Any:
        return self._tensor(name).numpy() if tag == "$array" else self._tensor(name)

    def _tensor(self, name: str) -> torch.Tensor:
        own = self._opened.manifest.resolve(name)
        if own not in self._tensors:
            self._tensors[own] = self._opened.tensor(own)
        return self._tensors[own]


def _module_state(tensors: Any, versions: Any) -> Any:
    made = OrderedDict(tensors)
    if versions is not None:
        kind = OrderedDict if isinstance(versions, OrderedDict) else dict  # torch's own, and what scripts put there
        made._metadata = _checked(versions, kind)  # type: ignore[attr-defined]
    return made


def _rebuilt(tag: str, content: Any) -> Any:
    """The object of a leaf. Raises LookupError, TypeError or ValueError for what is none."""
    if tag == "$namespace":
        return argparse.Namespace(**_checked(content, dict))
    if tag == "$path":
        return Path(_checked(content, str))
    if tag == "$size":
        return torch.Size(_checked(content, tuple))
    if tag == "$device":
        return torch.device(_checked(content, str))
    if tag == "$dtype" and isinstance(found := getattr(torch, _checked(content, str), None), torch.dtype):
        return found
    raise LookupError(f"{tag} is no leaf of a form")


def _checked(content: Any, kind: type) -> Any:
    if type(content) is not kind:
        raise TypeError(f"a {type(content).__name__}")
    return content

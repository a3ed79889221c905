"""A checkpoint as values for torch: its entries, or the value of the file it was imported from."""

import argparse
import re
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from workers.checkpoint.exchange.sources.dcp_folders import EXTRA_FILES
from workers.checkpoint.exchange.sources.source_form import ROOT_DEPTH
from workers.checkpoint.format import tree
from workers.checkpoint.format.manifest import DamagedCheckpoint, extra_states
from workers.checkpoint.format.optimizer_tree import as_torch, read_optimizer
from workers.checkpoint.loading.lazy_reader import OpenCheckpoint

SINGLE = ("torch", "dcp")
"""Formats whose source is a single value; DCP's may have one more file."""
_NAME = r"[^\x00-\x1f\x7f/.][^\x00-\x1f\x7f/]{0,254}"
FILE = re.compile(rf"(?:{_NAME}/)?{_NAME}")
"""Pattern of a file name in an origin: a name in the exported folder, or in a folder below it."""


class ExportedValues:
    """Values of an open checkpoint; its tensors are mapped from the shards, each once."""

    def __init__(self, checkpoint: OpenCheckpoint):
        self._checkpoint, self._tensors = checkpoint, dict[str, torch.Tensor]()
        self._used_entries: set[str] = set()
        self.origin = checkpoint.manifest.origin

    def entries(self) -> dict[str, Any]:
        """All entries: a module as {name: tensor} with its extra states, an optimizer as its state_dict."""
        return {name: self.entry(name) for name in self._checkpoint.manifest.entries}

    def entry(self, name: str) -> Any:
        manifest = self._checkpoint.manifest
        entry, decode = manifest.entries[name], partial(tree.decode, leaf=self._leaf)
        if entry.kind == "module":
            tensors = {n.removeprefix(f"{name}/"): self._tensor(n) for n in manifest.module_tensors(name)}
            return tensors | extra_states(entry, decode)
        if entry.kind == "optimizer":
            return as_torch(read_optimizer(name, entry), decode)
        return decode(entry.tree)

    def full_value(self) -> Any:
        """Return the value of the imported file; for any other checkpoint its entries."""
        if self.origin is None or self.origin.format not in SINGLE:
            return self.entries()
        names = [name for name in self.origin.files if name not in EXTRA_FILES or self.origin.format != "dcp"]
        return self.file(*names) if len(names) == 1 else self.entries()

    def extra_files(self) -> dict[str, Any]:
        """Return the contents of the extra files beside the sharded state in a DCP folder."""
        files = self.origin.files if self.origin is not None and self.origin.format == "dcp" else {}
        return {name: self.file(name) for name in EXTRA_FILES if name in files}

    def file(self, name: str) -> Any:
        """Return the content of file `name` of the source. Raises DamagedCheckpoint if its form is malformed."""
        assert self.origin is not None
        self._used_entries.clear()
        try:
            return tree.decode(self.origin.files[name], self._leaf, ROOT_DEPTH, self._decode_tag)
        except (KeyError, AttributeError) as e:
            raise DamagedCheckpoint(f"the manifest's form of {name!r:.200} is malformed: {e!r:.200}") from None

    def header(self, name: str) -> tuple[str, dict[str, str]]:
        """Return module and metadata of a safetensors file. Raises DamagedCheckpoint."""
        form = self.file(name)
        entry, metadata = (form.get("entry"), form.get("metadata")) if isinstance(form, dict) else (None, None)
        is_module = type(entry) is str and entry in self._checkpoint.manifest.entries
        if not is_module or type(metadata) is not dict or not all(type(text) is str for text in metadata.values()):
            raise DamagedCheckpoint(f"the manifest's form of {name!r:.200} names no module")
        return str(entry), metadata

    def names(self) -> list[str]:
        """List the files of the source. Raises DamagedCheckpoint for an invalid file name."""
        names = list(self.origin.files) if self.origin else []
        if invalid := [name for name in names if not FILE.fullmatch(name)]:
            raise DamagedCheckpoint(f"the manifest has a form of {invalid[0]!r:.200}, which is not a valid file name")
        return names

    def _decode_tag(self, tag: str, content: Any, depth: int) -> Any:
        if tag == "$entry":
            return self._entry_once(content)
        if tag == "$state_dict":
            name, versions = content
            return _module_state(self._entry_once(name), tree.decode(versions, self._leaf, depth, self._decode_tag))
        value = tree.decode(content, self._leaf, depth, self._decode_tag)
        return _module_state(*value) if tag == "$module_state" else _rebuild(tag, value)

    def _entry_once(self, name: str) -> Any:
        """Return an entry, once per file: otherwise a small form could include a large entry a million times."""
        if name in self._used_entries:
            raise ValueError(f"{name!r:.200} occurs twice in it")
        self._used_entries.add(name)
        return self.entry(name)

    def _leaf(self, name: str, tag: str) -> Any:
        return self._tensor(name).numpy() if tag == "$array" else self._tensor(name)

    def _tensor(self, name: str) -> torch.Tensor:
        own = self._checkpoint.manifest.resolve(name)
        if own not in self._tensors:
            self._tensors[own] = self._checkpoint.tensor(own)
        return self._tensors[own]


def _module_state(tensors: Any, versions: Any) -> Any:
    state_dict = OrderedDict(tensors)
    if versions is not None:
        kind = (
            OrderedDict if isinstance(versions, OrderedDict) else dict
        )  # torch uses OrderedDict, scripts may use dict
        state_dict._metadata = _check_type(versions, kind)  # type: ignore[attr-defined]
    return state_dict


def _rebuild(tag: str, content: Any) -> Any:
    """Build the object of a leaf. Raises LookupError, TypeError or ValueError for an invalid one."""
    if tag == "$namespace":
        return argparse.Namespace(**_check_type(content, dict))
    if tag == "$path":
        return Path(_check_type(content, str))
    if tag == "$size":
        return torch.Size(_check_type(content, tuple))
    if tag == "$device":
        return torch.device(_check_type(content, str))
    if tag == "$dtype" and isinstance(dtype := getattr(torch, _check_type(content, str), None), torch.dtype):
        return dtype
    raise LookupError(f"{tag} is not a supported leaf")


def _check_type(content: Any, kind: type) -> Any:
    if type(content) is not kind:
        raise TypeError(f"a {type(content).__name__}")
    return content

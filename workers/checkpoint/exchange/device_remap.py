"""Change devices in torch.save files, so that tensors of devices missing on the next machine load on the CPU.

`torch.load` puts each tensor on the device named in its file, and fails if there is no such device, unless its caller
passes `map_location`. Here the device's name in the pickle is replaced by `cpu`; everything else keeps its bytes and
positions, so no tensor is read and nothing is unpickled. Text that is not certain to name a tensor's device is not
changed.
"""

import os
import pickletools
import re
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cluster.input import sandbox
from workers.checkpoint.exchange.pickles import pickle_symbols
from workers.checkpoint.exchange.pickles.pickle_size_estimate import Unsound, scan
from workers.checkpoint.format.manifest_checks import open_regular

CPU = b"cpu"
DEVICE = re.compile(r"[a-z_]{3,20}(:[0-9]{1,4})?", re.ASCII)
TO_DEVICE = {
    "torch._utils _rebuild_device_tensor_from_cpu_tensor",
    "torch._utils _rebuild_device_tensor_from_numpy",
}
"""Functions for tensors without a readable storage, such as XLA's: (data, dtype, device, requires_grad)."""
TEXTS = {"BINUNICODE": 5, "SHORT_BINUNICODE": 2}
"""Opcodes of a text, with the number of bytes before the text itself."""
_CENTRAL, _DESCRIPTOR = b"PK\x01\x02", b"PK\x07\x08"
_MARK = object()

Loads = Callable[[str], bool]
"""Checks whether a tensor that names this device can be loaded."""


class Text(NamedTuple):
    """A text in a pickle: position of its opcode, the text, and the bytes before it."""

    at: int
    text: str
    head_bytes: int


@dataclass(slots=True)
class _Uses:
    """How often each text is used, and how often as the device of a tensor."""

    texts: "dict[int, Text]" = field(default_factory=dict)
    total_uses: "Counter[int]" = field(default_factory=Counter)
    device_uses: "Counter[int]" = field(default_factory=Counter)


def loads_on(kind: str, count: int) -> Loads:
    """Return a check for a machine with `count` devices of torch's type `kind`: cuda, xla, …"""
    names = {"cpu", "meta", kind, *(f"{kind}:{index}" for index in range(count))}
    return names.__contains__


def replace_devices(data: bytes, loads: Loads) -> tuple[bytes, Counter[str]]:
    """Return a pickle of the same length, and how many tensors of each device it moves to the CPU.
    Raises Unsound if that cannot be done, and ValueError for data that is not a pickle.
    """
    scan(data)
    uses = _uses(data)
    unavailable = [text for at, text in uses.texts.items() if uses.device_uses[at] and not loads(text.text)]
    moved: Counter[str] = Counter()
    for text in unavailable:
        if not DEVICE.fullmatch(text.text):
            raise Unsound(f"puts a tensor on {text.text[:40]!r}, which is not a device")
        if uses.device_uses[text.at] != uses.total_uses[text.at]:
            raise Unsound(f"uses {text.text!r} for purposes other than devices of tensors")
        if text.head_bytes != TEXTS["BINUNICODE"] or len(text.text.encode()) < len(CPU):
            raise Unsound(
                f"has {text.text!r} in a form that cannot be replaced; save it with torch's default pickle protocol"
            )
        moved[text.text] += uses.device_uses[text.at]
    return _replace_texts(data, unavailable), moved


def _replace_texts(data: bytes, texts: list[Text]) -> bytes:
    """Replace each text by `cpu`, and pad at the end: unpickling ignores bytes after the last opcode."""
    parts, done = [], 0
    for text in sorted(texts):
        parts += [data[done : text.at], b"X", struct.pack("<I", len(CPU)), CPU]
        done = text.at + text.head_bytes + len(text.text.encode())
    content = b"".join([*parts, data[done:]])
    return content + bytes(len(data) - len(content))


def _uses(data: bytes) -> _Uses:
    """Interpret the opcodes, tracking only texts, names and tuples; all other values are None."""
    uses, stack, memo = _Uses(), list[Any](), dict[int, Any]()
    argument: Any
    for opcode, argument, at in pickletools.genops(data):
        name = opcode.name
        if name in ("PERSID", "FRAME") or (name == "REDUCE" and len(stack) < 2):
            raise Unsound(f"has the opcode {name}, which torch's default protocol does not use")
        if name in TEXTS:
            assert at is not None
            uses.texts[at] = text = Text(at, argument, TEXTS[name])
            uses.total_uses[at] += 1
            stack.append(text)
        elif name == "GLOBAL":
            stack.append(argument)
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
            _count_use(uses.total_uses, memo[argument])
        elif name == "DUP":
            stack.append(stack[-1])
            _count_use(uses.total_uses, stack[-1])
        else:
            _run(opcode, stack, uses)
    return uses


def _run(opcode: Any, stack: list[Any], uses: _Uses) -> None:
    arguments = _pop_arguments(opcode, stack)
    if opcode.name == "BINPERSID":
        _count_device(uses, arguments[0], 3)
    elif opcode.name == "REDUCE" and isinstance(arguments[0], str) and arguments[0] in TO_DEVICE:
        _count_device(uses, arguments[1], 2)
    if opcode.stack_after:
        marks = opcode.stack_after[0] is pickletools.markobject
        stack.append(_MARK if marks else tuple(arguments) if opcode.name.startswith("TUPLE") else None)


def _pop_arguments(opcode: Any, stack: list[Any]) -> list[Any]:
    """Pop and return the arguments of an opcode, without the mark. `scan` has checked that they exist."""
    before = opcode.stack_before
    if opcode.name == "POP" and stack[-1] is _MARK:
        return [stack.pop()]
    if pickletools.markobject not in before:
        arguments = stack[len(stack) - len(before) :]
        del stack[len(stack) - len(before) :]
        return arguments
    mark = next(i for i in range(len(stack) - 1, -1, -1) if stack[i] is _MARK)
    start = mark - before.index(pickletools.markobject)
    arguments = stack[start:mark] + stack[mark + 1 :]
    del stack[start:]
    return arguments


def _count_device(uses: _Uses, arguments: Any, index: int) -> None:
    if isinstance(arguments, tuple) and len(arguments) > index and isinstance(arguments[index], Text):
        uses.device_uses[arguments[index].at] += 1


def _count_use(total: "Counter[int]", value: Any) -> None:
    """Count one more use of a text, or of all texts in a tuple."""
    if isinstance(value, Text):
        total[value.at] += 1
    elif isinstance(value, tuple):
        for item in value:
            _count_use(total, item)


def to_cpu(path: Path, loads: Loads, *, change: bool = True) -> Counter[str]:
    """Change the archive at `path` so that it loads; return {device: number of tensors it had}.
    No other process may have it open. Its modification time stays. Raises Unsound if it cannot be changed.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                pickles = [info for info in archive.infolist() if info.filename.endswith("data.pkl")]
                if len(pickles) != 1 or pickles[0].compress_type != zipfile.ZIP_STORED:
                    return Counter()  # not written by torch.save
                if pickles[0].file_size > pickle_symbols.MAX_PICKLE_BYTES:
                    raise Unsound(
                        f"has {pickles[0].file_size} bytes, at most {pickle_symbols.MAX_PICKLE_BYTES} are read"
                    )
                sandbox.raise_limits(metadata_bytes=pickles[0].file_size)
                data, moved = replace_devices(archive.read(pickles[0]), loads)
                patches = _patches(file.fileno(), pickles[0], archive.start_dir, data) if moved else []
        except (ValueError, LookupError, RecursionError, struct.error, zipfile.BadZipFile) as e:
            raise Unsound(str(e)) from e
    if patches and change:
        status = path.stat()
        sandbox.raise_limits(file_bytes=status.st_size)
        with path.open("r+b") as archive_file:
            for offset, patch in patches:
                os.pwrite(archive_file.fileno(), patch, offset)
            os.utime(archive_file.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
            os.fsync(archive_file.fileno())
    return moved


def _patches(descriptor: int, info: zipfile.ZipInfo, directory: int, data: bytes) -> list[tuple[int, bytes]]:
    """Patches that replace an entry's bytes by others of the same length, and all copies of its CRC."""
    header = os.pread(descriptor, 30, info.header_offset)
    name_bytes, extra_bytes = struct.unpack_from("<HH", header, 26)
    start = info.header_offset + 30 + name_bytes + extra_bytes
    crc = struct.pack("<I", zlib.crc32(data))
    patches = [(start, data), (_directory_offset(descriptor, directory, info) + 16, crc)]
    if info.flag_bits & 8:  # a data descriptor follows the data; the CRC in the header is not read then
        end = start + len(data)
        has_signature = os.pread(descriptor, 4, end) == _DESCRIPTOR
        return [*patches, (end + 4 * has_signature, crc)]
    return [*patches, (info.header_offset + 14, crc)]


def _directory_offset(descriptor: int, at: int, info: zipfile.ZipInfo) -> int:
    """Return the position of the entry in the archive's central directory."""
    name = info.orig_filename.encode()
    while (head := os.pread(descriptor, 46, at))[:4] == _CENTRAL:
        name_bytes, extra_bytes, comment_bytes = struct.unpack_from("<HHH", head, 28)
        if os.pread(descriptor, name_bytes, at + 46) == name:
            return at
        at += 46 + name_bytes + extra_bytes + comment_bytes
    raise Unsound("is not in the archive's list of entries")

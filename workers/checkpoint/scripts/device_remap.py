"""Files of torch.save whose tensors name a device that the next machine has not got: they are given to the CPU.

`torch.load` puts each tensor where its file says, and fails where there is no such device, unless its caller passes
`map_location`. Where the name of a device stands in the pickle it is replaced by `cpu`; all else stays byte for byte
where it was, so no tensor is read and nothing is unpickled. What is not certain to be the name of a tensor's device
stays as it is.
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

from cluster import sandbox
from workers.checkpoint.exchange import pickle_symbols
from workers.checkpoint.exchange.pickle_size_estimate import Unsound, scan
from workers.checkpoint.format.manifest_checks import open_regular

CPU = b"cpu"
DEVICE = re.compile(r"[a-z_]{3,20}(:[0-9]{1,4})?", re.ASCII)
TO_DEVICE = {
    "torch._utils _rebuild_device_tensor_from_cpu_tensor",
    "torch._utils _rebuild_device_tensor_from_numpy",
}
"""How torch saves tensors without a storage that it can read, as XLA's: (data, dtype, device, requires_grad)."""
TEXTS = {"BINUNICODE": 5, "SHORT_BINUNICODE": 2}
"""Instructions for a text, with the bytes before it."""
_CENTRAL, _DESCRIPTOR = b"PK\x01\x02", b"PK\x07\x08"
_MARK = object()

Loads = Callable[[str], bool]
"""Whether a tensor that names this device can be loaded."""


class Text(NamedTuple):
    """A text in a pickle: where its instruction begins, and its length."""

    at: int
    text: str
    head_bytes: int


@dataclass(slots=True)
class _Uses:
    """How often each text is used, and how often as the device of a tensor."""

    of: "dict[int, Text]" = field(default_factory=dict)
    total: "Counter[int]" = field(default_factory=Counter)
    device: "Counter[int]" = field(default_factory=Counter)


def loads_on(kind: str, count: int) -> Loads:
    """With so many devices of torch's `kind`: cuda, xla, …"""
    names = {"cpu", "meta", kind, *(f"{kind}:{index}" for index in range(count))}
    return names.__contains__


def without_devices(data: bytes, loads: Loads) -> tuple[bytes, Counter[str]]:
    """A pickle of the same length, and how many tensors of each device are on the CPU now. Raises Unsound where that
    cannot be done, and ValueError for what is no pickle.
    """
    scan(data)
    uses = _uses(data)
    foreign = [text for at, text in uses.of.items() if uses.device[at] and not loads(text.text)]
    moved: Counter[str] = Counter()
    for text in foreign:
        if not DEVICE.fullmatch(text.text):
            raise Unsound(f"puts a tensor on {text.text[:40]!r}, which is no device")
        if uses.device[text.at] != uses.total[text.at]:
            raise Unsound(f"says {text.text!r} of other things than tensors, too")
        if text.head_bytes != TEXTS["BINUNICODE"] or len(text.text.encode()) < len(CPU):
            raise Unsound(f"has {text.text!r} in a form that is not replaced; torch's default protocol is")
        moved[text.text] += uses.device[text.at]
    return _replaced(data, foreign), moved


def _replaced(data: bytes, texts: list[Text]) -> bytes:
    """What comes after the last instruction is read by nobody: the length stays."""
    parts, done = [], 0
    for text in sorted(texts):
        parts += [data[done : text.at], b"X", struct.pack("<I", len(CPU)), CPU]
        done = text.at + text.head_bytes + len(text.text.encode())
    whole = b"".join([*parts, data[done:]])
    return whole + bytes(len(data) - len(whole))


def _uses(data: bytes) -> _Uses:
    """Runs the instructions on texts, names and tuples; all other values are None."""
    uses, stack, memo = _Uses(), list[Any](), dict[int, Any]()
    argument: Any
    for opcode, argument, at in pickletools.genops(data):
        name = opcode.name
        if name in ("PERSID", "FRAME") or (name == "REDUCE" and len(stack) < 2):
            raise Unsound(f"has the instruction {name}, which torch's default protocol has not")
        if name in TEXTS:
            assert at is not None
            uses.of[at] = text = Text(at, argument, TEXTS[name])
            uses.total[at] += 1
            stack.append(text)
        elif name == "GLOBAL":
            stack.append(argument)
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
            _used(uses.total, memo[argument])
        elif name == "DUP":
            stack.append(stack[-1])
            _used(uses.total, stack[-1])
        else:
            _run(opcode, stack, uses)
    return uses


def _run(opcode: Any, stack: list[Any], uses: _Uses) -> None:
    taken = _taken(opcode, stack)
    if opcode.name == "BINPERSID":
        _device(uses, taken[0], 3)
    elif opcode.name == "REDUCE" and isinstance(taken[0], str) and taken[0] in TO_DEVICE:
        _device(uses, taken[1], 2)
    if opcode.stack_after:
        marks = opcode.stack_after[0] is pickletools.markobject
        stack.append(_MARK if marks else tuple(taken) if opcode.name.startswith("TUPLE") else None)


def _taken(opcode: Any, stack: list[Any]) -> list[Any]:
    """What an instruction takes, without the mark. `scan` has seen that it is there."""
    before = opcode.stack_before
    if opcode.name == "POP" and stack[-1] is _MARK:
        return [stack.pop()]
    if pickletools.markobject not in before:
        taken = stack[len(stack) - len(before) :]
        del stack[len(stack) - len(before) :]
        return taken
    at = next(i for i in range(len(stack) - 1, -1, -1) if stack[i] is _MARK)
    start = at - before.index(pickletools.markobject)
    taken = stack[start:at] + stack[at + 1 :]
    del stack[start:]
    return taken


def _device(uses: _Uses, arguments: Any, index: int) -> None:
    if isinstance(arguments, tuple) and len(arguments) > index and isinstance(arguments[index], Text):
        uses.device[arguments[index].at] += 1


def _used(total: "Counter[int]", value: Any) -> None:
    """Once more, with all that a tuple holds."""
    if isinstance(value, Text):
        total[value.at] += 1
    elif isinstance(value, tuple):
        for one in value:
            _used(total, one)


def to_cpu(path: Path, loads: Loads, *, change: bool = True) -> Counter[str]:
    """Change the archive at `path`, which nobody else has open, so that it loads: {device: tensors that it had}. Its
    time of change stays. Raises Unsound where it is left as it is.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                pickles = [info for info in archive.infolist() if info.filename.endswith("data.pkl")]
                if len(pickles) != 1 or pickles[0].compress_type != zipfile.ZIP_STORED:
                    return Counter()  # not of torch.save
                if pickles[0].file_size > pickle_symbols.LARGEST_BYTES:
                    raise Unsound(f"has {pickles[0].file_size} bytes, at most {pickle_symbols.LARGEST_BYTES} are read")
                sandbox.raise_limits(metadata_bytes=pickles[0].file_size)
                data, moved = without_devices(archive.read(pickles[0]), loads)
                patches = _patches(file.fileno(), pickles[0], archive.start_dir, data) if moved else []
        except (ValueError, LookupError, RecursionError, struct.error, zipfile.BadZipFile) as e:
            raise Unsound(str(e)) from e
    if patches and change:
        before = path.stat()
        sandbox.raise_limits(file_bytes=before.st_size)
        with path.open("r+b") as whole:
            for at, changed in patches:
                os.pwrite(whole.fileno(), changed, at)
            os.utime(whole.fileno(), ns=(before.st_atime_ns, before.st_mtime_ns))
            os.fsync(whole.fileno())
    return moved


def _patches(descriptor: int, info: zipfile.ZipInfo, directory: int, data: bytes) -> list[tuple[int, bytes]]:
    """The entry with other bytes of the same length: these, and its CRC wherever that stands."""
    header = os.pread(descriptor, 30, info.header_offset)
    name_bytes, extra_bytes = struct.unpack_from("<HH", header, 26)
    start = info.header_offset + 30 + name_bytes + extra_bytes
    crc = struct.pack("<I", zlib.crc32(data))
    found = [(start, data), (_in_directory(descriptor, directory, info) + 16, crc)]
    if info.flag_bits & 8:  # a descriptor behind the data; the header's own field is not read then
        behind = start + len(data)
        signed = os.pread(descriptor, 4, behind) == _DESCRIPTOR
        return [*found, (behind + 4 * signed, crc)]
    return [*found, (info.header_offset + 14, crc)]


def _in_directory(descriptor: int, at: int, info: zipfile.ZipInfo) -> int:
    """Where the archive's list has that entry."""
    wanted = info.orig_filename.encode()
    while (head := os.pread(descriptor, 46, at))[:4] == _CENTRAL:
        name_bytes, extra_bytes, comment_bytes = struct.unpack_from("<HHH", head, 28)
        if os.pread(descriptor, name_bytes, at + 46) == wanted:
            return at
        at += 46 + name_bytes + extra_bytes + comment_bytes
    raise Unsound("is not where the archive's list says")

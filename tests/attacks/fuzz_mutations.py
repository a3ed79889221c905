"""Inputs made of valid samples: pieces flipped, cut, repeated, spliced, lengths edited, values of JSON replaced.

A mutation is five numbers, so that hypothesis can draw and shrink it and a campaign can draw it from a seed.
"""

import json
import random
import struct
from collections.abc import Callable, Sequence

LARGEST_INPUT_BYTES = 1 << 16
INTERESTING = (
    *(0, 1, 2, 7, 8, 127, 128, 255, 256, 32767, 65535, 65536),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1),
)
VALUES = (
    None, True, False, 0, -1, 1.5, 2**31, 2**63, -(2**63) - 1, 10**30, 1e308, "", "x", "\0", "..", "../../etc/passwd",
    "/etc/passwd", "NaN", "16", [], {}, [[]], [0] * 50, {"a": {"a": {}}}, "\ud800", "a" * 300, "x://y", "1e400",
    "\u2028",
)  # fmt: skip
TOKENS = (
    *(b"\0", b"\xff", b"\n", b"\r\n", b"\x0c", b"\xe2\x80\xa8", b"\xc2\x85", b"\x1c", b"\xed\xa0\x80"),
    *(b"\t", b"\\", b"'", b'"', b"{", b"}", b"[", b"]", b"[" * 2000, b'{"a":' * 500, b"null", b"-1", b"true"),
    *(b"NaN", b"Infinity"),
    *(b"1e999", b"9" * 40, b"9" * 5000, b"../", b"/etc/passwd", b"://", b"::", b"%00", b"%ff", b"&", b"*", b"**/"),
    *(b"!!python/object/apply:os.system", b"&a", b"*a", b"|", b">", b"---", b"#", b":", b";", b"==", b"~", b"@"),
    *(b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"),
    *(b"\x80\x04", b"cposix\nsystem\n", b"cos\nsystem\n", b"R.", b"(", b"\x85", b")\x81", b"b.", b"\x94", b"h\x00"),
    *(b"cfuzz_canary\nrun\n", b"\x8c\x0cfuzz_canary\x8c\x03run\x93"),
    *(b"nvidia:H100:8", b"2..8", b"1h30m", b"16GiB", b"s3://", b"${HOME}", b"-r "),
)
Mutation = tuple[int, int, int, int, int]
"""(what, where, with which value, of how many bytes, taken from where); each is reduced to what there is."""


def drawn(chance: random.Random) -> tuple[list[Mutation], int]:
    """Mutations, and which sample to begin with."""
    count = 1 + min(int(chance.expovariate(0.7)), 7)
    return [tuple(chance.getrandbits(32) for _ in range(5)) for _ in range(count)], chance.getrandbits(16)


def mutated(samples: Sequence[bytes], which: int, mutations: Sequence[Mutation]) -> bytes:
    data = samples[which % len(samples)]
    for what, *numbers in mutations:
        data = KINDS[what % len(KINDS)](data, samples, *numbers)[:LARGEST_INPUT_BYTES]
    return data


def _flip(data: bytes, samples: Sequence[bytes], at: int, value: int, size: int, other: int) -> bytes:
    return _put(data, at, bytes([data[at % len(data)] ^ (1 << value % 8)]) if data else b"\0")


def _byte(data: bytes, samples: Sequence[bytes], at: int, value: int, size: int, other: int) -> bytes:
    return _put(data, at, bytes([value % 256]))


def _number(data: bytes, samples: Sequence[bytes], at: int, value: int, size: int, other: int) -> bytes:
    """A length field: 1 to 8 bytes, little-endian."""
    width = (1, 2, 4, 8)[size % 4]
    return _put(data, at, struct.pack("<Q", INTERESTING[value % len(INTERESTING)])[:width])


def _cut(data: bytes, samples: Sequence[bytes], at: int, value: int, size: int, other: int) -> bytes:
    return data[: at % (len(data) + 1)]


def _remove(data: bytes, samples: Sequence[bytes], at: int, value: int, size: int, other: int) -> bytes:
    start = at % (len(data) + 1)
    return data[:start] + data[start + 1 + size % 32 :]


def _repeat(data: bytes, samples: Sequence[bytes], at: int, value: int, size: int, other: int) -> bytes:
    start = at % (len(data) + 1)
    return data[:start] + data[start : start + 1 + size % 64] * (1 + value % 20) + data[start:]


def _splice(data: bytes, samples: Sequence[bytes], at: int, value: int, size: int, other: int) -> bytes:
    second = samples[value % len(samples)]
    return data[: at % (len(data) + 1)] + second[other % (len(second) + 1) :]


def _token(data: bytes, samples: Sequence[bytes], at: int, value: int, size: int, other: int) -> bytes:
    start = at % (len(data) + 1)
    return data[:start] + TOKENS[value % len(TOKENS)] + data[start + (size % 3) * 2 :]


def _digits(data: bytes, samples: Sequence[bytes], at: int, value: int, size: int, other: int) -> bytes:
    """The number written nearest behind `at` becomes another."""
    start = next((i for i in range(at % (len(data) + 1), len(data)) if data[i : i + 1].isdigit()), None)
    if start is None:
        return data
    end = next((i for i in range(start, len(data)) if not data[i : i + 1].isdigit()), len(data))
    return data[:start] + str(INTERESTING[value % len(INTERESTING)]).encode() + data[end:]


def _json(data: bytes, samples: Sequence[bytes], at: int, value: int, size: int, other: int) -> bytes:
    """One value of a JSON text replaced, removed, doubled or wrapped."""
    try:
        tree = json.loads(data)
        places = list(_places(tree))
    except (ValueError, RecursionError):
        return data
    if not places:
        return data
    holder, key = places[at % len(places)]
    if size % 5 == 0 and isinstance(holder, dict):
        del holder[key]
    elif size % 5 == 1 and isinstance(holder, list):
        holder[:] = holder * (1 + other % 20)
    elif size % 5 == 2:
        holder[key] = [holder[key]]
    elif size % 5 == 3 and isinstance(holder, dict):
        holder[str(VALUES[value % len(VALUES)])] = holder[key]
    else:
        holder[key] = VALUES[value % len(VALUES)]
    return json.dumps(tree).encode()


def _places(tree: object) -> "list[tuple[object, object]]":
    found, todo = [], [tree]
    while todo:
        here = todo.pop()
        keys = list(here) if isinstance(here, dict) else range(len(here)) if isinstance(here, list) else ()
        found += [(here, key) for key in keys]
        todo += [here[key] for key in keys]
    return found


def _put(data: bytes, at: int, new: bytes) -> bytes:
    start = at % (len(data) + 1)
    return data[:start] + new + data[start + len(new) :]


KINDS: tuple[Callable[..., bytes], ...] = (
    *(_flip, _byte, _number, _number, _cut, _remove, _repeat, _splice, _token, _token, _digits, _json, _json, _json),
)

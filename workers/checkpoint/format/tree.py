"""Encode values other than tensors as JSON with typed leaves, so that types are restored.

    null true "text" 1 1.5 [..] {"key": ..}   themselves
    {"$tuple": [..]} {"$set": [..]} {"$frozenset": [..]}
    {"$dict": [[key, value], ..]}             a dict with other keys than plain strings; also $ordered_dict, $counter
    {"$int": "0x.."}                          beyond 2^53, where other JSON readers lose digits
    {"$float": "inf"}                         inf, -inf, nan
    {"$complex": ["0x1.8p+0", ..]} {"$bytes": "base64"}
    {"$scalar": ["<f8", "hex"]}               a numpy scalar, bit for bit
    {"$tensor": "name"} {"$array": "name"}    a tensor or a numpy array, stored in a shard

Any other type is refused by name when saving: the alternative would be pickle.
"""

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from workers.checkpoint.format.manifest import DamagedCheckpoint
from workers.checkpoint.format.message_text import key_text
from workers.errors import CheckpointError

MAX_DEPTH = 100
EXACT_IN_JSON = 2**53
_SEQUENCES: dict[type, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset"}
_MAPPINGS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered_dict", Counter: "$counter"}

Leaf = Callable[[Any, str], Any]
"""Handles types that the tree does not. To JSON: (value, where it is). From JSON: (name of the tensor, tag)."""
TagDecoder = Callable[[str, Any, int], Any]
"""Decodes leaves of trees other than an entry's: (tag, content, depth). Raises LookupError for an unknown tag."""


def encode(value: Any, path: str, leaf: Leaf, depth: int = 0) -> Any:
    """Return JSON data for `value`. `leaf` encodes tensors, arrays and unknown types, or raises. `path` is for
    messages.
    """
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{path} is nested deeper than {MAX_DEPTH}", "check that it does not contain itself")
    kind = type(value)
    if kind is list or kind in _SEQUENCES:
        items = [encode(item, f"{path}/{i}", leaf, depth + 1) for i, item in enumerate(value)]
        return items if kind is list else {_SEQUENCES[kind]: items}
    if kind in _MAPPINGS:
        return _encode_mapping(value, path, leaf, depth)
    return _encode_scalar(value, path, leaf)


def decode(tree: Any, leaf: Leaf, depth: int = 0, decode_tag: TagDecoder | None = None) -> Any:
    """Return the value that was passed to `encode`. Raises DamagedCheckpoint for a leaf of an unknown or malformed
    type.
    """
    if depth > MAX_DEPTH:
        raise DamagedCheckpoint(f"the manifest has values nested deeper than {MAX_DEPTH}")
    if isinstance(tree, list):
        return [decode(item, leaf, depth + 1, decode_tag) for item in tree]
    if not isinstance(tree, dict):
        return tree
    tag = next(iter(tree), "")
    if not tag.startswith("$"):
        return {key: decode(value, leaf, depth + 1, decode_tag) for key, value in tree.items()}
    try:
        return _decode_tagged(tag, tree[tag], leaf, depth + 1, decode_tag)
    except (LookupError, TypeError, ValueError, ArithmeticError) as e:
        raise DamagedCheckpoint(f"the manifest has a malformed {tag} leaf: {e}") from None


def raise_unsupported(value: Any, path: str) -> Any:
    """Refuse a value: the `leaf` of trees without tensors, and the last resort of every other `leaf`."""
    raise CheckpointError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which would need pickle",
        "save it as numbers, strings, bytes, tuples, lists, dicts, tensors or arrays",
    )


def _encode_mapping(value: dict[Any, Any], path: str, leaf: Leaf, depth: int) -> Any:
    if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(item, f"{path}/{key}", leaf, depth + 1) for key, item in value.items()}
    pairs = []
    for key, item in value.items():
        text = key_text(key)
        encoded_key = encode(key, f"{path} (key {text})", raise_unsupported, depth + 1)
        pairs.append([encoded_key, encode(item, f"{path}/{text}", leaf, depth + 1)])
    return {_MAPPINGS[type(value)]: pairs}


def _encode_scalar(value: Any, path: str, leaf: Leaf) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) <= EXACT_IN_JSON else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is complex:
        return {"$complex": [value.real.hex(), value.imag.hex()]}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, np.generic) and is_portable(value.dtype):
        return {"$scalar": [value.dtype.str, value.tobytes().hex()]}
    return leaf(value, path)


def is_portable(dtype: "np.dtype[Any]") -> bool:
    """Check that a numpy dtype is the same on every machine; long double is not."""
    return (
        dtype.kind in "biu"
        or (dtype.kind == "f" and dtype.itemsize <= 8)
        or (dtype.kind == "c" and dtype.itemsize <= 16)
    )


def _decode_tagged(tag: str, content: Any, leaf: Leaf, depth: int, decode_tag: TagDecoder | None) -> Any:
    if tag in ("$tensor", "$array"):
        return leaf(content, tag)
    for kind, name in _SEQUENCES.items():
        if tag == name:
            return kind(decode(item, leaf, depth, decode_tag) for item in content)
    for kind, name in _MAPPINGS.items():
        if tag == name:
            return kind(
                {decode(key, leaf, depth, decode_tag): decode(item, leaf, depth, decode_tag) for key, item in content}
            )
    if tag in _SCALARS:
        return _SCALARS[tag](content)
    if decode_tag is None:
        raise ValueError("its tag is unknown")
    return decode_tag(tag, content, depth)


def _scalar(content: Any) -> Any:
    dtype = np.dtype(content[0])
    if not is_portable(dtype):
        raise ValueError(f"{content[0]} is not a portable number type")
    return np.frombuffer(bytes.fromhex(content[1]), dtype, count=1)[0]


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "$int": lambda text: int(text, 16),
    "$float": float,
    "$complex": lambda parts: complex(float.fromhex(parts[0]), float.fromhex(parts[1])),
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$scalar": _scalar,
}

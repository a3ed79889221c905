"""Any bytes at all, given to readers of manifests, safetensors headers, pickles and archives: a value, or our error.

The functions below take bytes and are what a longer campaign calls, too.
"""

import io
import json
import pickle
import tempfile
import zipfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.errors import PolyfleetError
from workers.checkpoint.exchange.pickles import pickle_symbols
from workers.checkpoint.exchange.pickles.pickle_values import PickleDecoder
from workers.checkpoint.exchange.sources.formats import read
from workers.checkpoint.exchange.sources.safetensors_files import parse_header
from workers.checkpoint.format import tree
from workers.checkpoint.format.manifest import manifest_digest
from workers.checkpoint.format.manifest_checks import parse_manifest

FEW = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def manifest(data: bytes) -> object:
    return parse_manifest(data, "bytes")


def signed_manifest(data: bytes) -> object:
    """The same of JSON whose digest is made to hold, so that what follows is reached; and the trees in it."""
    try:
        told = json.loads(data)
        told["digest"] = manifest_digest(told)
        data = json.dumps(told).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass
    found = parse_manifest(data, "bytes")
    return [tree.decode(entry.tree, lambda name, tag: name) for entry in found.entries.values()]


def safetensors_header(data: bytes) -> object:
    return parse_header(data, "bytes")


def pickled(data: bytes) -> object:
    return PickleDecoder().value(pickle_symbols.read(data, "bytes"), "bytes")


def archive(data: bytes) -> object:
    """A file of torch.save."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.pt")
        path.write_bytes(data)
        return read(path, "torch", True)


def archive_of(data: bytes) -> object:
    """`data` for the pickle in a file of torch.save."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        file.writestr("a/data.pkl", data)
        file.writestr("a/data/0", b"\0" * 64)
    return archive(made.getvalue())


def held(function, data):
    try:
        function(data)
    except PolyfleetError as e:
        assert len(str(e)) < 20_000


def mutated(seeds):
    """A seed with some bytes replaced, left out, repeated or put in."""

    @st.composite
    def make(draw):
        data = bytearray(draw(st.sampled_from(seeds)))
        for _ in range(draw(st.integers(1, 4))):
            at = draw(st.integers(0, len(data)))
            new = draw(st.one_of(st.binary(max_size=9), st.just(draw(st.sampled_from(seeds))[at : at + 40])))
            data[at : at + draw(st.integers(0, 9))] = new
        return bytes(data)

    return make()


VALUES = {
    "step": 1, "w": [1.5, None, True, (1, "x"), {1, 2}, b"bytes", 1 << 70, {"a": {2: 3}}],
    "when": complex(1, 2),
}  # fmt: skip
PICKLES = [pickle.dumps(VALUES, protocol) for protocol in (0, 2, 4, 5)] + [
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
    b"X\x03\x00\x00\x00cpuK\x10tQK\x00K\x02K\x04\x86K\x04K\x01\x86\x89}tR.",
    b"\x80\x02ccollections\nOrderedDict\n)R(X\x01\x00\x00\x00acargparse\nNamespace\n)R}X\x01\x00\x00\x00bNsbu.",
]
HELD = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
HEADERS = [json.dumps({"t": HELD, "u": HELD | {"data_offsets": [24, 48]}, "__metadata__": {"a": "b"}}).encode()]
MANIFESTS = [
    json.dumps({
        "format": "polyfleet-checkpoint", "version": 2, "step": 1, "created": "x", "producer": {"epoch": 1},
        "world": {"size": 2, "mesh": [2], "dims": ["dp"]},
        "files": {"a.safetensors": {"bytes": 64, "xxh3_128": ["0" * 32]}},
        "tensors": {
            "m/w": {"role": "parameter", "dtype": "float32", "shape": [2, 3], "shards": [
                {"file": "a.safetensors", "offset": 8, "start": [0, 0], "shape": [1, 3]},
                {"file": "a.safetensors", "offset": 20, "start": [1, 0], "shape": [1, 3]}], "layout": [1, 0]},
            "m/v": {"role": "parameter", "alias_of": "m/w", "dtype": "float32", "shape": [2],
                    "view": {"offset": 1, "strides": [2]}},
        },
        "entries": {"m": {"kind": "module", "tree": {"extra": {"$tuple": [{"$int": "0x1"}, {"$float": "inf"},
            {"$bytes": "AA=="}, {"$scalar": ["<f8", "0000000000000000"]}, {"$dict": [[1, {"$complex": ["0x0p+0",
            "0x0p+0"]}]]}, {"$set": [1, 2]}, {"$tensor": "m/w"}]}}}},
    }).encode()
]  # fmt: skip


@FEW
@given(st.one_of(st.binary(max_size=300), mutated(MANIFESTS)))
def test_any_manifest_is_read_or_refused(data):
    held(manifest, data)
    held(signed_manifest, data)


@FEW
@given(st.one_of(st.binary(max_size=300), mutated(HEADERS)))
def test_any_safetensors_header_is_read_or_refused(data):
    held(safetensors_header, data)


@FEW
@given(st.one_of(st.binary(max_size=300), mutated(PICKLES)))
def test_any_pickle_is_read_or_refused(data):
    held(pickled, data)
    held(archive_of, data)


def archived(data):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        file.writestr("a/data.pkl", data)
        file.writestr("a/byteorder", "little")
        file.writestr("a/data/0", b"\0" * 64)
    return made.getvalue()


@FEW
@given(st.one_of(st.binary(max_size=300), mutated([archived(data) for data in PICKLES])))
def test_any_archive_is_read_or_refused(data):
    held(archive, data)


def test_the_seeds_are_read():
    signed_manifest(MANIFESTS[0])
    assert len(safetensors_header(HEADERS[0])) == 2
    for data in PICKLES[:4]:
        assert pickled(data) == VALUES
    for data in PICKLES:
        archive(archived(data))

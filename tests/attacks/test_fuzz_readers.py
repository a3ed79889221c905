"""A few hundred mutated inputs per reader; `make fuzz` gives each of them tens of thousands. See fuzz_targets.py."""

import random
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside this file; nothing else is called like them

import fuzz_guard
import fuzz_mutations
from fuzz_targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
BITS = st.integers(0, 2**32 - 1)
MUTATIONS = st.lists(st.tuples(BITS, BITS, BITS, BITS, BITS), min_size=1, max_size=6)


@pytest.fixture(scope="module", params=TARGETS, ids=lambda target: target.name)
def target(request):
    yield request.param
    request.param.close()


@pytest.fixture(scope="module")
def sandbox(target, tmp_path_factory):
    """The reader's folder. Readers of records look for them in a home."""
    folder = tmp_path_factory.mktemp("sandbox")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYFLEET_HOME", str(folder))
        yield folder


def test_valid_inputs_are_read(target, sandbox):
    """Also loads what a reader imports on first use, so that the guard sees nothing but the reading."""
    for data in target.samples():
        assert target.read(data, sandbox) is not None or target.name == "HTTP request", data[:200]


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,  # `make fuzz` looks further: what it finds is not a reason for a test to fail now and then
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(which=st.integers(0, 100), mutations=MUTATIONS)
def test_mutated_inputs_are_refused_or_read(target, sandbox, which, mutations):
    data = fuzz_mutations.mutated(target.samples(), which, mutations)
    fuzz_guard.judged(target.read, data, sandbox)


def test_inputs_that_once_broke_a_reader_are_refused_or_read(target, sandbox):
    for path in sorted((CORPUS / target.name.replace(" ", "-")).glob("*.bin")):
        fuzz_guard.judged(target.read, path.read_bytes(), sandbox)


def test_the_guard_sees_what_it_is_there_for(tmp_path):
    """A guard that sees nothing would pass every reader."""
    outside, sandbox = tmp_path / "outside", tmp_path / "sandbox"
    sandbox.mkdir()
    taken = []

    def memory(data, folder):
        taken.append(bytearray(600 << 20))
        taken.clear()

    def loop(data, folder):
        while True:
            pass

    breaches = {
        "open .*outside": lambda data, folder: outside.write_text("x"),
        "os.mkdir .*outside": lambda data, folder: outside.mkdir(),
        "os.system": lambda data, folder: __import__("os").system("true"),
        "subprocess.Popen": lambda data, folder: __import__("subprocess").run(["true"]),
        "exec .*<string>": lambda data, folder: exec(compile("1", "<string>", "exec")),
        r"(computed for|took) [2-9]\.": loop,
        "took [5-9].. MiB": memory,
    }
    for said, breach in breaches.items():
        with pytest.raises(AssertionError, match=said):
            fuzz_guard.judged(breach, b"", sandbox)
    assert not outside.exists()
    (sandbox / "a").mkdir()
    assert fuzz_guard.judged(lambda data, folder: (folder / "a/b").write_text("x"), b"", sandbox) == "accepted"


def test_mutations_can_be_repeated_and_change_something():
    samples = [b'{"a": [1, 2, {"b": "c"}]}', b"PK\x03\x04 123"]
    made = [fuzz_mutations.mutated(samples, which, drawn) for drawn, which in map(drawing, range(300))]
    assert made == [fuzz_mutations.mutated(samples, which, drawn) for drawn, which in map(drawing, range(300))]
    assert len(set(made) - set(samples)) > 200
    assert max(map(len, made)) <= fuzz_mutations.LARGEST_INPUT_BYTES


def drawing(seed):
    return fuzz_mutations.drawn(random.Random(seed))

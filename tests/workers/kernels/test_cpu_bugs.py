"""Bugs planted in the C++ sources, each built in a scratch copy: the contract's cases, or a test of ours, must fail."""

import re
import shutil

import pytest
import torch
from kernel_cases import CASES, check

from workers import kernels as registry
from workers.kernels.drivers import cpu_library

pytestmark = pytest.mark.full

BUGS = {
    "the tail of a row is lost": (
        "cpu_vectors.hpp",
        "    if (i < n) f(i, Part{int(n - i)});",
        "",
        ("rmsnorm-3x13", torch.float32),
    ),
    "the last row is lost": (
        "cpu_threads.hpp",
        "for (int64_t row = begin; row < end; row++) f(row);",
        "for (int64_t row = begin; row + 1 < end; row++) f(row);",
        ("rmsnorm-5x127", torch.float32),
    ),
    "the mean counts what lies beyond the row": (
        "cpu_norms.cpp",
        "inverse_root(sum_of_squares(x, n) / double(n), eps)",
        "inverse_root(sum_of_squares(x, n) / double((n + 31) / 32 * 32), eps)",
        ("rmsnorm-5x127", torch.float32),
    ),
    "a token sees from the beginning": (
        "cpu_attention.cpp",
        "token + of.kept - of.tokens + 1",
        "token + 1",
        ("attention-causal-longer-past", torch.float32),
    ),
    "bfloat16 is cut, not rounded": (
        "cpu_vectors.hpp",
        "(bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16",
        "bits >> 16",
        None,
    ),
}


@pytest.fixture
def rebuilt(tmp_path, monkeypatch):
    """`rebuilt(operation, file, old, new)`: the kernels built from a copy of the sources in which `new` stands for
    `old`. Only the file of the operation is compiled, and the one that all need."""
    if reason := registry.unavailable_reason("cpu"):
        pytest.skip(reason)
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path / "home"))

    def build(operation, file, old, new):
        folder = tmp_path / "sources"
        shutil.copytree(cpu_library.SOURCES, folder)
        text = (folder / file).read_text()
        assert text.count(old) == 1, f"{file} has no such line any more: {old}"
        (folder / file).write_text(text.replace(old, new))
        files = [name for name in cpu_library.FILES if name == "cpu_threads" or defines(folder, name, operation)]
        functions = {
            name: letters
            for name, letters in cpu_library._ARGUMENTS.items()
            if any(defines(folder, file, name) for file in files)
        }
        assert operation in functions and len(files) == 2
        monkeypatch.setattr(cpu_library, "FILES", files)
        monkeypatch.setattr(cpu_library, "_ARGUMENTS", functions)
        monkeypatch.setattr(cpu_library, "SOURCES", folder)
        monkeypatch.setattr(cpu_library, "FLAGS", (*cpu_library.FLAGS, "-O0"))
        return registry.create("cpu")

    return build


def defines(folder, file, function):
    return re.search(rf"\bpolyfleet_{function}\(", (folder / f"{file}.cpp").read_text()) is not None


@pytest.fixture
def unwritten_is_nan():
    """New memory is filled with NaN: what a kernel leaves out is not right by chance."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("bug", [name for name, planted in BUGS.items() if planted[3]])
def test_a_planted_bug_fails_a_case_of_the_contract(bug, rebuilt, unwritten_is_nan):
    *change, (name, dtype) = BUGS[bug]
    case = next(case for case in CASES if str(case) == name)
    check(registry.create("cpu"), case, dtype)
    with pytest.raises(AssertionError):
        check(rebuilt(case.operation, *change), case, dtype)


def test_cutting_instead_of_rounding_shows_in_the_bits(rebuilt):
    """It is within what the contract allows bfloat16."""
    a, x = torch.tensor([[1.0078125]], dtype=torch.bfloat16), torch.tensor([1.5], dtype=torch.bfloat16)
    rounded = (a.float() * x.float()).bfloat16()[0]
    assert float(rounded) > 1.0078125 * 1.5, "a product that is rounded up"
    assert torch.equal(registry.create("cpu").weighted_sum_rows(x, a), rounded)
    assert not torch.equal(
        rebuilt("weighted_sum_rows", *BUGS["bfloat16 is cut, not rounded"][:3]).weighted_sum_rows(x, a), rounded
    )

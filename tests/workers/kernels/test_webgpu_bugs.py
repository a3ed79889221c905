"""Bugs planted in the WGSL of the kernels, on lavapipe: cases of the contract notice each."""

import shutil

import pytest
import torch
from kernel_cases import CASES, check

from workers import kernels as registry
from workers.errors import KernelsFailed
from workers.kernels.drivers import webgpu_source

BUGS = {
    "the tail of a row is not masked": (
        "rmsnorm", "first_of(load4_x(row + c), columns - c, 0.0)", "load4_x(row + c)", "rmsnorm-3x13", torch.float32,
    ),
    "the last row is lost": (
        "softmax", "if (index >= options.groups)", "if (index + 1u >= options.groups)", "softmax-3x13", torch.float32,
    ),
    "the tree leaves out a half": (
        "tree", "half_of = GROUP / 2u; half_of > 0u", "half_of = GROUP / 4u; half_of > 0u", "layernorm-17x257",
        torch.bfloat16,
    ),
    "values of an odd row are stored over its neighbour's": (
        "output_16", "if (count > 1u && i % 2u == 0u)", "if (count > 1u)", "rmsnorm-17x257", torch.float16,
    ),
    "the tail of the depth is lost": (
        "matmul", "k < options.end; k += DEPTH", "k + DEPTH <= options.end; k += DEPTH", "matmul-33x65x17",
        torch.float32,
    ),
    "a vector is that of another matrix": (
        "matmul_vec", "index / options.rows * depth", "0u", "matmul_vec-batched", torch.float32,
    ),
    "the tree of columns ends early": (
        "weighted_sum_rows", "half_of >= ACROSS", "half_of > ACROSS", "weighted_sum_rows-130x257", torch.float16,
    ),
    "sums do not shrink when a greater score comes": (
        "attention", "before * shrink + sums_of", "before + sums_of", "attention-decode",
        torch.float32,
    ),
    "a head uses the wrong group": (
        "attention", "head / (options.heads / options.key_heads)", "head % options.key_heads", "attention-grouped",
        torch.float16,
    ),
}  # fmt: skip


@pytest.fixture
def rebuilt(tmp_path, monkeypatch):
    """`rebuilt(file, old, new)`: kernels of sources in which `new` stands for `old`."""
    if reason := registry.unavailable_reason("webgpu"):
        pytest.skip(reason)  # test_contract.py fails where it must be there

    def build(file, old, new):
        shutil.copytree(webgpu_source.SOURCES, tmp_path / "sources")
        source = tmp_path / "sources" / f"webgpu_{file}.wgsl"
        assert old in source.read_text(), f"webgpu_{file}.wgsl has no such line any more: {old}"
        source.write_text(source.read_text().replace(old, new))
        monkeypatch.setattr(webgpu_source, "SOURCES", tmp_path / "sources")
        return registry.create("webgpu")

    return build


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_fails_a_case_of_the_contract(bug, rebuilt):
    file, old, new, name, dtype = BUGS[bug]
    with pytest.raises(AssertionError, match=name):
        check(rebuilt(file, old, new), next(case for case in CASES if str(case) == name), dtype)


def test_a_source_that_does_not_build_is_reported_with_its_first_error(rebuilt, monkeypatch):
    broken = rebuilt("silu", "options.count - i", "options.amount - i")
    with pytest.raises(KernelsFailed, match=r"does not build webgpu_silu.wgsl: .*invalid field accessor `amount`"):
        broken.silu(torch.zeros(3))
    monkeypatch.undo()
    assert broken.silu(torch.zeros(3)).tolist() == [0.0] * 3

"""Every implementation that can compute here, made once for all tests of a process."""

import os
from collections import Counter

import pytest
import torch

from workers import kernels as registry

MADE = {}
COMPILED = 50
"""Tests after which programs of Pallas' interpreter are forgotten: hundreds of them take 0.7 GB of a process."""
counts = Counter()


def told(absent, name, why):
    """`.ci/run` installs what these need: there a test fails where one cannot be used."""
    if name == "cpu":
        absent("compiler", why)
    if name == "opencl":
        absent("opencl", why)
    if name == "webgpu":
        absent("webgpu", why)
    if name == "triton":
        absent("triton", why)
    if name == "pallas":
        absent("pallas", why)
    pytest.skip(why)


def on_a_gpu(name):
    """`-m gpu` runs the contract there, on a machine that has one: nothing of Ray and pydantic is imported."""
    return name == "triton" and torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ


@pytest.fixture(params=[pytest.param(n, marks=[pytest.mark.gpu] if on_a_gpu(n) else []) for n in registry.BUILTIN])
def kernels(request, absent):
    name = request.param
    if name not in MADE:
        if reason := registry.unavailable_reason(name):
            told(absent, name, f"kernels {name!r} are not available here: {reason}")
        MADE[name] = registry.create(name)
    yield MADE[name]
    counts[name] += 1
    if name == "pallas" and counts[name] % COMPILED == 0:
        MADE[name].close()

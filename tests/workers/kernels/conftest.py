"""Every implementation that can compute here, made once for all tests of a process."""

import os
from collections import Counter

import pytest
from kernel_cases import dtypes_by_turns

from workers import kernels as registry
from workers.kernels.drivers.cpu_library import compiled

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
    """`-m gpu` runs the contract on a machine that has one, and skips it on others: nothing of Ray and pydantic is
    imported."""
    return name == "triton" and "TRITON_INTERPRET" not in os.environ


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home without measurements. The compiled library is loaded before, from the home where it is built once."""
    if not registry.unavailable_reason("cpu"):
        compiled(True)
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


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


@pytest.fixture
def dtypes_of():
    return dtypes_by_turns

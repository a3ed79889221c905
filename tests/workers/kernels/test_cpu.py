"""What the compiled CPU kernels promise beyond the contract: the same bits on any number of threads, in any thread and
after a fork, options that are proven, reasons where no compiler is, and a process whose arithmetic stays as it was.
"""

import os
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_cases import CASES, check, draw, judge
from torch.nn import functional as F

from cluster.errors import UserError
from workers import kernels as registry
from workers import native
from workers.errors import KernelsUnavailable
from workers.kernels.drivers import cpu_proofs
from workers.measurement.accuracy import Rounding
from workers.native.compiler import COMPILERS

ROOT = Path(__file__).parents[3]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=("f32", "f16", "bf16"))
FORKED = """
import os, sys, torch
from workers.kernels import create
torch.set_num_threads(4)
kernels, x = create("cpu"), torch.randn(1024, 1031)
before = kernels.rmsnorm(x)
child = os.fork()
if child == 0:
    os._exit(0 if all(torch.equal(kernels.rmsnorm(x), before) for _ in range(20)) else 1)
_, status = os.waitpid(child, 0)
assert torch.equal(kernels.rmsnorm(x), before)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.fixture(scope="module")
def made():
    if reason := registry.unavailable_reason("cpu"):
        pytest.skip(reason)
    return registry.create("cpu")


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def calls(kernels, dtype):
    """Of every operation, one large enough that several threads share it. Products of float32, and of bfloat16 on some
    CPUs, are torch's: here they are of float16."""
    x, g, w = (draw(*shape).to(dtype) for shape in ((700, 1031), (1031, 700), (1031,)))
    g = g.t().contiguous()
    q, kept = draw(2, 4, 130, 72).to(dtype), draw(2, 2, 190, 72).to(dtype)
    turns = draw(700, 500).to(dtype)
    xx, ww = x.half(), w.half()
    products = {"matmul": lambda: kernels.matmul(x.half(), g.half().t())}
    return products | {
        "rmsnorm": lambda: kernels.rmsnorm(x, w),
        "layernorm": lambda: kernels.layernorm(x, w, w),
        "softmax": lambda: kernels.softmax(x),
        "silu": lambda: kernels.silu(x),
        "swiglu": lambda: kernels.swiglu(x, g),
        "apply_rope": lambda: kernels.apply_rope(x, turns, turns),
        "matmul_vec": lambda: kernels.matmul_vec(xx, ww),
        "weighted_sum_rows": lambda: kernels.weighted_sum_rows(xx.t().contiguous()[:, 0], xx.t().contiguous()),
        "attention": lambda: kernels.attention(q, kept, kept, causal=True, return_lse=True),
        "rmsnorm_backward": lambda: kernels.rmsnorm_backward(g, x, w),
        "layernorm_backward": lambda: kernels.layernorm_backward(g, x, w, w),
        "softmax_backward": lambda: kernels.softmax_backward(g, x),
        "silu_backward": lambda: kernels.silu_backward(g, x),
        "swiglu_backward": lambda: kernels.swiglu_backward(g, x, g),
    }


def bits(answer):
    """A digest of all that a call answered, NaN included."""
    parts = answer if isinstance(answer, tuple) else (answer,)
    return [part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts]


@dtypes
def test_bits_are_the_same_on_any_number_of_threads_and_each_time(made, dtype):
    for name, call in calls(made, dtype).items():
        with threads(1):
            alone = bits(call())
        for count in (2, 3, 4):
            with threads(count):
                assert bits(call()) == alone, f"{name} on {count} threads"


def test_threads_of_the_program_may_call_at_once(made):
    tasks = calls(made, torch.bfloat16)
    with threads(3):
        want = {name: bits(call()) for name, call in tasks.items()}
        found = []
        start = threading.Barrier(4)

        def work():
            start.wait()
            found.extend((name, bits(call()) == want[name]) for _ in range(3) for name, call in tasks.items())

        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert len(found) == 4 * 3 * len(tasks)
    assert [name for name, same in found if not same] == []


def test_a_forked_process_computes_with_threads_of_its_own(made):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_both_options_are_proven_on(made):
    with threads(2):
        simd, parallel = made.prove()
    assert simd.effective and simd.expected, simd
    assert parallel.effective and parallel.expected, parallel
    assert "2 of 2 threads" in parallel.evidence


def test_without_parallel_every_call_stays_on_its_thread(made):
    alone = registry.create("cpu", use_parallel=False)
    with threads(2):
        proof = alone.prove()[1]
        assert (proof.expected, proof.effective) == (False, True), proof
        x = draw(700, 1031)
        assert torch.equal(alone.rmsnorm(x), made.rmsnorm(x))
        assert alone.device_info()["threads"] == 1


def test_without_simd_no_vector_instruction_computes_and_results_are_as_right(made):
    plain = registry.create("cpu", use_simd=False)
    assert plain.device_info()["lanes"] == 1
    if shutil.which("objdump"):
        proof = plain.prove()[0]
        assert (proof.expected, proof.effective) == (False, True), proof
    for case in CASES:
        check(plain, case, torch.float16)
        check(plain, case, torch.bfloat16)


def test_torch_computes_what_it_is_faster_at_and_wrong_calls_get_our_words(made):
    x, w, q = draw(64, 256), draw(256), draw(1, 4, 20, 16)
    calls = {
        "softmax": ((x,), x.softmax(-1)), "silu": ((x,), F.silu(x)), "matmul_vec": ((x, w), x @ w),
        "layernorm": ((x, w, w), F.layer_norm(x, (256,), w, w)), "matmul": ((x, x.T), x @ x.T),
        "weighted_sum_rows": ((x[:, 0].contiguous(), x), x[:, 0] @ x),
        "attention": ((q, q[:, :2], q[:, :2]), F.scaled_dot_product_attention(q, q[:, :2], q[:, :2], enable_gqa=True)),
    }  # fmt: skip
    for operation, (arguments, expected) in calls.items():
        assert torch.equal(getattr(made, operation)(*arguments), expected), operation
    own = registry.create("cpu", use_parallel=False)
    assert made.leaves_to_torch and not own.leaves_to_torch
    for operation, (arguments, expected) in calls.items():
        torch.testing.assert_close(getattr(own, operation)(*arguments), expected, rtol=1e-4, atol=1e-5)
    learning = draw(64, 256).requires_grad_()
    for call in (
        lambda: made.matmul(x, x), lambda: made.matmul_vec(x, x[:, 0]), lambda: made.weighted_sum_rows(w, x),
        lambda: made.layernorm(x, w[:3]), lambda: made.softmax(learning), lambda: made.matmul(learning, x.T),
        lambda: made.attention(q, q[:, :3], q[:, :3]), lambda: made.layernorm(x, w, learning[0]),
    ):  # fmt: skip
        with pytest.raises(UserError):
            call()


def test_an_instruction_counts_only_if_it_computes_several_values():
    for line in ("vfmadd231ps %zmm1,%zmm2,%zmm3", "mulps  %xmm1,%xmm0", "fmla  v0.4s, v1.4s, v2.4s"):
        assert cpu_proofs.PACKED.search(f"  1a2b:\t{line}")
    for line in ("vfmadd231ss %xmm1,%xmm2,%xmm3", "movaps %xmm1,%xmm0", "vpaddd %ymm0,%ymm1,%ymm2", "fmul  s0, s1, s2"):
        assert not cpu_proofs.PACKED.search(f"  1a2b:\t{line}")


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=("f16", "bf16"))
def test_what_is_stored_is_rounded_to_nearest_even(made, dtype):
    """A product of two such numbers is exact in float32, so that only the store rounds."""
    raw = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    every = raw.view(dtype)
    for factor in (1.0, 1.0078125, -0.3359375, 3.0, 1e-3, 2.0**-9, 2.0**9):
        x = torch.tensor([factor], dtype=dtype)
        want = (every.float() * x.float()).to(dtype)
        have = made.matmul_vec(every[:, None].contiguous(), x)
        same = (have.view(torch.int16) == want.view(torch.int16)) | (have.isnan() & want.isnan())
        zero = (have == 0) & (want == 0)  # a sum that begins at 0 has no negative zero
        assert bool((same | zero).all()), f"factor {factor}: {every[~(same | zero)][:5]}"


@dtypes
@pytest.mark.parametrize("columns", (65537, 131072, 131075, 300001))
def test_rows_of_any_width_are_right(made, columns, dtype):
    """Softmax keeps its exponentials up to 131,072 columns and computes them twice beyond."""
    x, reference = draw(2, columns).to(dtype), registry.create("numpy")
    for operation in ("rmsnorm", "layernorm", "softmax", "silu"):
        want = getattr(reference, operation)(x.double())
        judge(made, getattr(made, operation)(x), want, Rounding(dtype, columns, 3), f"{operation} {columns}")


def test_numbers_below_the_smallest_normal_one_stay_in_the_whole_process(made):
    made.softmax(draw(512, 1031))
    tiny = np.full(64, 1e-40, dtype=np.float32)
    told = []
    thread = threading.Thread(target=lambda: told.append(bool((tiny * np.float32(0.5) > 0).all())))
    thread.start()
    thread.join()
    assert told == [True] and bool((tiny * np.float32(0.5) > 0).all())
    assert bool((made.silu(torch.from_numpy(tiny)) > 0).all())


def test_compiled_code_that_is_turned_off_is_a_reason(monkeypatch):
    monkeypatch.setenv("POLYFLEET_NATIVE", "off")
    assert registry.unavailable_reason("cpu") == "POLYFLEET_NATIVE=off turns compiled code off"
    with pytest.raises(KernelsUnavailable, match="turns compiled code off"):
        registry.create("cpu")


def test_without_a_compiler_the_reason_names_those_looked_for(tmp_path, monkeypatch):
    _nothing_built(tmp_path, monkeypatch)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ", ".join(COMPILERS) in registry.unavailable_reason("cpu")


def test_a_compiler_that_fails_is_told_before_anything_is_computed(tmp_path, monkeypatch):
    _nothing_built(tmp_path, monkeypatch)
    broken = tmp_path / "broken"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo broken 1 && exit 0\necho "error: no back end" >&2\nexit 1\n'
    )
    broken.chmod(0o700)
    monkeypatch.setenv("CXX", str(broken))
    assert "error: no back end" in registry.unavailable_reason("cpu")
    with pytest.raises(KernelsUnavailable, match="no back end"):
        registry.create("cpu")


def test_a_compiler_that_breaks_after_creation_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    if reason := registry.unavailable_reason("cpu"):
        pytest.skip(reason)
    late = registry.create("cpu")
    _nothing_built(tmp_path, monkeypatch)
    monkeypatch.setenv("CXX", str(tmp_path / "gone"))
    with pytest.raises(KernelsUnavailable, match="cannot be run"):
        late.silu(draw(3, 5))
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("POLYFLEET_NATIVE", "off")
    with pytest.raises(KernelsUnavailable, match="use kernels 'torch'"):
        late.silu(draw(3, 5))


def test_the_description_names_compiler_processor_and_threads(made):
    with threads(2):
        told = made.device_info()
    assert told["device"] == "cpu" and told["threads"] == 2 and told["lanes"] in (4, 8, 16)
    assert "-O3" in told["flags"] and "fast-math" not in told["flags"]
    assert told["device_name"] and told["compiler"]


def _nothing_built(folder, monkeypatch):
    monkeypatch.setenv("POLYFLEET_HOME", str(folder / "home"))
    monkeypatch.setattr(native, "_libraries", {})

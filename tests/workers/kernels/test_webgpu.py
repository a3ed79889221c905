"""Kernels in WGSL on lavapipe, a Vulkan driver for CPUs: bits, limits, memory, faults."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kernel_cases import CASES, angles, check, draw, reference

from cluster.errors import UserError
from workers import kernels as registry
from workers.errors import KernelsFailed
from workers.kernels.drivers import webgpu_adapters

GROUP_OF_GPUS = 256
EACH_DTYPE = [
    *("rmsnorm-17x257", "layernorm-5x127", "softmax-3x5120", "rmsnorm-weight-in-float32", "rmsnorm-llama"),
    *("silu-17x257", "swiglu-3x13", "apply_rope-halves-partial", "matmul-33x65x17", "matmul-both-transposed"),
    *("matmul_vec-257x130", "weighted_sum_rows-130x257", "compute_attention_scores-2x4x2x5x7x16"),
    *("attention-grouped", "attention-primes", "attention-float-mask", "attention-a-row-that-sees-nothing"),
]


@pytest.fixture(scope="module")
def webgpu():
    if reason := registry.unavailable_reason("webgpu"):
        pytest.skip(reason)  # test_contract.py fails where it must be there
    return registry.create("webgpu")


def named(name):
    return next(case for case in CASES if str(case) == name)


def set_driver(webgpu, monkeypatch, **values):
    for name, value in values.items():
        monkeypatch.setattr(webgpu.driver, name, value)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("f32", "bf16"))
@pytest.mark.parametrize("name", EACH_DTYPE)
def test_groups_of_gpus_compute_what_the_contract_asks(webgpu, monkeypatch, name, dtype):
    """The contract has the smaller groups of CPUs."""
    set_driver(webgpu, monkeypatch, group=GROUP_OF_GPUS)
    check(webgpu, named(name), dtype)


def test_an_adapter_is_named_by_words_of_its_name(webgpu):
    name = webgpu.device_info()["device_name"]
    assert registry.create("webgpu", on=name.upper()).device_info()["device_name"] == name
    with pytest.raises(UserError, match="no WebGPU adapter is named 'radeon'"):
        registry.create("webgpu", on="radeon")


class TestBits:
    """Every value of 16 bits: a compiler may assume that none is NaN or infinite."""

    def every(self, dtype):
        return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)

    @pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=("f16", "bf16"))
    def test_all_values_are_loaded_and_stored_as_they_are(self, webgpu, dtype):
        """What rope does not rotate is copied; an odd width puts each row at another half of a word."""
        values = self.every(dtype)
        rows = torch.cat([torch.zeros(2, dtype=dtype), values, torch.ones(1, dtype=dtype)]).expand(2, -1)
        have = webgpu.apply_rope(rows, *angles(2, 1))[:, 2:-1]
        numbers = ~values.isnan()
        assert torch.equal(have[:, numbers].view(torch.int16), values.view(torch.int16)[numbers].expand(2, -1))
        assert have[:, ~numbers].isnan().all()

    @pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=("f16", "bf16"))
    def test_sums_are_rounded_to_nearest_even(self, webgpu, dtype):
        values = self.every(dtype)
        rows = torch.stack([values, values[torch.randperm(len(values), generator=torch.Generator().manual_seed(1))]])
        have = webgpu.weighted_sum_rows(torch.ones(2, dtype=dtype), rows)
        want = rows.float().sum(0).to(dtype)
        torch.testing.assert_close(have, want, rtol=0, atol=0, equal_nan=True)

    def test_rows_of_infinity_and_nan_are_what_torch_computes(self, webgpu):
        inf, nan = float("inf"), float("nan")
        x = torch.tensor([[1.0, inf], [1.0, -inf], [-inf, -inf], [nan, 1.0], [-3e38, 3e38], [89.0, -104.0]])
        torch.testing.assert_close(webgpu.softmax(x), x.softmax(-1), equal_nan=True)
        torch.testing.assert_close(webgpu.silu(x), torch.nn.functional.silu(x), equal_nan=True)
        q, mask = torch.ones(1, 1, 2, 4), torch.tensor([[0.0, -inf], [-inf, -inf]])
        values, sums = webgpu.attention(q, q, q, mask=mask, return_lse=True)
        assert values.tolist() == [[[[1.0] * 4, [0.0] * 4]]]
        assert sums.tolist() == [[[2.0, -inf]]]


ROWS = {
    "rmsnorm": lambda k, x: k.rmsnorm(x, x[0]),
    "layernorm": lambda k, x: k.layernorm(x, x[0], x[1]),
    "softmax": lambda k, x: k.softmax(x),
    "silu": lambda k, x: k.silu(x.flatten()),
    "swiglu": lambda k, x: k.swiglu(x.flatten(), x.flatten() + 1),
    "rope": lambda k, x: k.apply_rope(x.view(40, 25, 33), *angles(30, 16), position=5),
}


class TestLimits:
    """Results are the same bits where arrays or loops are larger than a driver allows for one dispatch."""

    @pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=("f32", "f16"))
    @pytest.mark.parametrize("name", ROWS)
    def test_rows_of_a_large_array_are_split(self, webgpu, monkeypatch, name, dtype):
        call, x = ROWS[name], draw(1000, 33).to(dtype)
        whole = call(webgpu, x)
        set_driver(webgpu, monkeypatch, largest_binding_bytes=256 * 33 * x.itemsize)
        assert torch.equal(call(webgpu, x), whole)

    def test_what_cannot_be_split_is_refused_with_numbers(self, webgpu, monkeypatch):
        x = draw(8, 64)
        set_driver(webgpu, monkeypatch, largest_binding_bytes=1024)
        with pytest.raises(KernelsFailed, match=r"a takes 2048 bytes; llvmpipe.* binds at most 1024; call it on fewer"):
            webgpu.matmul(x, x.mT)
        with pytest.raises(
            KernelsFailed, match=r"a part of the rows takes \d+ bytes; .* binds at most 1024; use shorter rows"
        ):
            webgpu.softmax(draw(4, 4097))
        set_driver(webgpu, monkeypatch, largest_bytes=1000)
        with pytest.raises(KernelsFailed, match=r"an array has 2048 bytes; .* allows at most 1000; call it on fewer"):
            webgpu.softmax(x)
        monkeypatch.undo()
        torch.testing.assert_close(webgpu.softmax(x), x.softmax(-1))

    def test_the_longest_row_is_right_and_a_longer_one_refused(self, webgpu):
        """llvmpipe ends the loops of an invocation after 65,535 iterations, without an error."""
        most = webgpu.driver.max_steps // 3 * webgpu.driver.group * 4
        x = torch.ones(1, most)
        x[0, -1] = 3.0
        total = float(x.double().exp().sum())
        assert webgpu.softmax(x)[0, -1].item() == pytest.approx(20.085537 / total, rel=1e-5)
        with pytest.raises(KernelsFailed, match=rf"a row has {most + 1} columns; llvmpipe.* computes at most {most} "):
            webgpu.softmax(torch.ones(1, most + 1))

    def test_long_sums_are_computed_in_several_dispatches(self, webgpu, monkeypatch):
        a, b, dispatched = draw(5, 1000), draw(1000, 7), []
        whole = webgpu.matmul(a, b)
        dispatch = webgpu.driver.dispatch
        monkeypatch.setattr(webgpu.driver, "dispatch", lambda *given: (dispatched.append(given[2]), dispatch(*given)))
        set_driver(webgpu, monkeypatch, max_steps=600)
        torch.testing.assert_close(webgpu.matmul(a, b), whole, rtol=1e-5, atol=1e-4)
        assert [(options[4], options[5]) for options in dispatched] == [(0, 296), (296, 592), (592, 888), (888, 1000)]

    @pytest.mark.parametrize("causal", (False, True))
    def test_keys_of_attention_are_too(self, webgpu, monkeypatch, causal):
        q, k, v = draw(1, 4, 3, 16), draw(1, 2, 500, 16), draw(1, 2, 500, 24)
        set_driver(webgpu, monkeypatch, max_steps=200)
        assert webgpu._keys_at_once(16, 24) == 128
        have = webgpu.attention(q, k, v, causal=causal, return_lse=True)
        want = reference().attention(q.double(), k.double(), v.double(), causal=causal, return_lse=True)
        for one, other in zip(have, want, strict=True):
            torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-6)

    def test_groups_beyond_one_dimension_are_dispatched_in_two(self, webgpu):
        x = draw(70_001, 2)
        torch.testing.assert_close(webgpu.softmax(x), x.softmax(-1))


class TestMemory:
    def test_arrays_stay_on_the_device(self, webgpu):
        x, weight = draw(6, 35).half(), draw(35).half()
        on_device = webgpu.to_device(x)
        normed = webgpu.rmsnorm(on_device, webgpu.to_device(weight))
        assert (tuple(normed.shape), normed.dtype) == ((6, 35), torch.float16)
        assert torch.equal(webgpu.to_host(webgpu.silu(normed)), webgpu.silu(webgpu.rmsnorm(x, weight)))
        assert webgpu.to_device(normed) is normed

    @pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("f32", "bf16"))
    def test_in_place_and_split(self, webgpu, monkeypatch, dtype):
        x = draw(1000, 33).to(dtype)
        on_device = webgpu.to_device(x)
        want = webgpu.swiglu(x, webgpu.softmax(x))
        set_driver(webgpu, monkeypatch, largest_binding_bytes=256 * 33 * x.itemsize)
        shares = webgpu.softmax(on_device)
        assert webgpu.swiglu(on_device, shares, out=shares) is shares
        assert torch.equal(webgpu.to_host(shares), want)
        assert torch.equal(webgpu.to_host(on_device), x)

    def test_an_output_of_the_caller_is_overwritten(self, webgpu):
        out = webgpu.to_device(torch.full((3, 5), float("nan")).bfloat16())
        webgpu.softmax(webgpu.to_device(draw(3, 5).bfloat16()), out=out)
        assert torch.equal(webgpu.to_host(out), webgpu.softmax(draw(3, 5).bfloat16()))

    def test_arrays_of_other_kernels_are_refused(self, webgpu):
        other = registry.create("webgpu")
        with pytest.raises(UserError, match="is on the device of other kernels"):
            other.softmax(webgpu.to_device(draw(2, 3)))
        assert torch.equal(other.to_host(other.to_device(webgpu.to_device(draw(2, 3)))), draw(2, 3))

    def test_an_array_larger_than_the_staging_memory_is_copied_in_pieces(self, webgpu, monkeypatch):
        monkeypatch.setattr("workers.kernels.drivers.webgpu_device.STAGING_BYTES", 1 << 10)
        webgpu.close()
        x = draw(3, 1001).half()
        assert torch.equal(webgpu.to_host(webgpu.to_device(x)), x)
        webgpu.close()

    def test_closed_kernels_begin_anew(self, webgpu):
        webgpu.close()
        assert webgpu.softmax(torch.zeros(1, 4)).tolist() == [[0.25] * 4]

    def test_threads_take_turns(self, webgpu):
        arrays = [draw(40 + n, 200) for n in range(16)]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(webgpu.softmax, arrays))
        assert all(torch.allclose(have, x.softmax(-1), atol=1e-6) for have, x in zip(found, arrays, strict=True))


class TestFaults:
    def test_after_a_lost_device_the_next_call_is_right(self, webgpu):
        x = draw(3, 40)
        before = webgpu.to_device(x)
        webgpu.driver._device.destroy()
        with pytest.raises(KernelsFailed, match=r"the device of llvmpipe.* was lost; call it again"):
            webgpu.softmax(x)
        torch.testing.assert_close(webgpu.softmax(x), x.softmax(-1))
        with pytest.raises(KernelsFailed, match="an array was on a device that is lost; move it there again"):
            webgpu.softmax(before)
        torch.testing.assert_close(webgpu.to_host(webgpu.softmax(webgpu.to_device(x))), x.softmax(-1))

    def test_without_a_driver_the_reason_is_reported(self, webgpu):
        code = "from workers import kernels; print(kernels.unavailable_reason('webgpu'))"
        done = child(code, VK_DRIVER_FILES="/none", VK_ICD_FILENAMES="/none")
        assert done.stdout.startswith("no WebGPU adapter is available; on Linux install a Vulkan driver")

    def test_without_the_library_too(self, webgpu, monkeypatch):
        monkeypatch.setitem(sys.modules, "wgpu", None)
        webgpu_adapters.import_wgpu.cache_clear()
        assert registry.unavailable_reason("webgpu") == "wgpu is not installed: pip install 'polyfleet[webgpu]'"
        monkeypatch.undo()
        assert registry.unavailable_reason("webgpu") == ""

    def test_without_memory_the_call_is_refused_and_the_next_is_right(self, webgpu):
        done = child(
            "import resource, torch; from workers import kernels\n"
            "k, kept = kernels.create('webgpu'), []; k.softmax(torch.zeros(1, 4))\n"
            "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
            "resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), -1))\n"
            "try:\n    for _ in range(40): kept.append(k.driver.allocate(1 << 24))\n"
            "except Exception as e: print(e, flush=True)\n"
            "kept.clear(); print(k.softmax(torch.zeros(1, 4)).tolist())"
        )
        first, last = done.stdout.splitlines()
        assert "the device is out of memory: an array of 16777216 bytes does not fit; call it on fewer rows" in first
        assert last == "[[0.25, 0.25, 0.25, 0.25]]"

    def test_a_fork_is_told_how_to_start_instead_and_nothing_else_is_printed(self, webgpu):
        code = (
            "import os, torch; from workers import kernels; k = kernels.create('webgpu'); k.silu(torch.zeros(3))\n"
            "if not os.fork():\n    try: k.silu(torch.zeros(3))\n    except Exception as e: print(e, flush=True)\n"
            "    print(kernels.unavailable_reason('webgpu'), flush=True); os._exit(0)\nos.wait()"
        )
        done = child(code)
        error, reason = done.stdout.splitlines()
        assert "this process was forked from one that uses WebGPU; start processes with the method 'spawn'" in error
        assert reason == "this process was forked from one that uses WebGPU"
        assert done.stderr == ""


def child(code, **variables):
    words = [sys.executable, "-c", code]
    return subprocess.run(words, env=os.environ | variables, capture_output=True, text=True)

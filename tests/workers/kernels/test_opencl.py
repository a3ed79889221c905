"""Kernels in OpenCL on PoCL, a driver for CPUs: both forms, memory, faults, and bugs planted in the sources."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kernel_cases import CASES, check, draw

from cluster.errors import UserError
from workers import kernels as registry
from workers.errors import KernelsFailed
from workers.kernels.drivers import opencl_driver

NARROW = [case for case in CASES if not case.name.endswith(("32768", "65537", "131072"))]
EACH_DTYPE = [
    *("rmsnorm-17x257", "layernorm-5x127", "softmax-3x5120", "rmsnorm-weight-in-float32", "silu-17x257", "swiglu-3x13"),
    *("apply_rope-halves-partial", "matmul-33x65x17", "matmul-both-transposed", "matmul_vec-257x130"),
    *(
        "weighted_sum_rows-130x257",
        "compute_attention_scores-2x4x2x5x7x16",
        "attention-grouped",
        "attention-float-mask",
    ),
]


@pytest.fixture(scope="module")
def opencl():
    if reason := registry.unavailable_reason("opencl"):
        pytest.skip(reason)  # test_contract.py fails where it must be there
    return registry.create("opencl")


@pytest.fixture(scope="module")
def groups(opencl):
    return registry.create("opencl", form="groups")


def named(name):
    return next(case for case in CASES if str(case) == name)


class TestForms:
    """The contract has the form of the device, here "items"."""

    @pytest.mark.parametrize("case", NARROW, ids=str)
    def test_groups_compute_what_the_contract_asks(self, groups, case):
        check(groups, case, torch.bfloat16)

    @pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=("f32", "f16"))
    @pytest.mark.parametrize("name", EACH_DTYPE)
    def test_in_every_dtype(self, groups, name, dtype):
        check(groups, named(name), dtype)

    def test_they_are_chosen_by_device_or_named(self, opencl, groups):
        assert (opencl.device_info()["form"], groups.device_info()["form"]) == ("items", "groups")
        with pytest.raises(UserError, match=r"unknown form 'group'.*did you mean 'groups'"):
            registry.create("opencl", form="group")

    def test_a_device_is_named_by_words_of_its_name(self, opencl):
        name = opencl.device_info()["device_name"]
        assert registry.create("opencl", on=name.lower()).device_info()["device_name"] == name
        with pytest.raises(UserError, match="no OpenCL device is named 'radeon'"):
            registry.create("opencl", on="radeon")


class TestMemory:
    def test_torchs_memory_is_used_where_it_is(self, opencl, monkeypatch):
        """On a CPU nothing is copied."""
        x = draw(7, 300)
        monkeypatch.setattr(opencl.driver.cl, "enqueue_copy", None)
        assert torch.allclose(opencl.softmax(x), x.softmax(-1), atol=1e-6)
        assert opencl.softmax(x, out=x) is x
        assert torch.allclose(x.sum(-1), torch.ones(7))

    @pytest.mark.parametrize("name", EACH_DTYPE)
    def test_elsewhere_it_is_copied(self, opencl, monkeypatch, name):
        monkeypatch.setattr(opencl.driver, "on_cpu", False)
        check(opencl, named(name), torch.bfloat16)

    def test_arrays_stay_on_the_device(self, opencl):
        x, weight = draw(6, 70).half(), draw(70).half()
        on_device = opencl.to_device(x)
        normed = opencl.rmsnorm(on_device, opencl.to_device(weight))
        assert (tuple(normed.shape), normed.dtype) == ((6, 70), torch.float16)
        assert torch.equal(opencl.to_host(opencl.silu(normed)), opencl.silu(opencl.rmsnorm(x, weight)))
        assert opencl.softmax(on_device, out=on_device) is on_device
        assert torch.equal(opencl.to_host(on_device), opencl.softmax(x))
        assert opencl.to_device(normed) is normed

    def test_arrays_of_other_kernels_are_refused(self, opencl, groups):
        with pytest.raises(UserError, match="is on the device of other kernels"):
            groups.softmax(opencl.to_device(draw(2, 3)))
        moved = groups.to_device(opencl.to_device(draw(2, 3)))
        assert torch.equal(groups.to_host(moved), draw(2, 3))

    def test_an_array_the_driver_cannot_hold_is_refused(self, opencl, monkeypatch):
        monkeypatch.setattr(opencl.driver, "largest_bytes", 1000)
        with pytest.raises(KernelsFailed, match=r"an array has 1200 bytes.*allows at most 1000; call it on fewer rows"):
            opencl.softmax(draw(3, 100))
        assert torch.equal(opencl.softmax(draw(2, 100)), opencl.softmax(draw(2, 100)))

    def test_closed_kernels_begin_anew(self, opencl):
        opencl.close()
        assert opencl.softmax(torch.zeros(1, 4)).tolist() == [[0.25] * 4]


def test_threads_take_turns(opencl):
    arrays = [draw(40 + n, 200) for n in range(16)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(opencl.softmax, arrays))
    assert all(torch.allclose(have, x.softmax(-1), atol=1e-6) for have, x in zip(found, arrays, strict=True))


class TestFaults:
    def child(self, code, **variables):
        words = [sys.executable, "-c", code]
        return subprocess.run(words, env=os.environ | variables, capture_output=True, text=True)

    def test_without_a_driver_the_reason_is_told(self, opencl):
        code = "from workers import kernels; print(kernels.unavailable_reason('opencl'))"
        done = self.child(code, OCL_ICD_VENDORS="/nonexistent")
        assert done.stdout.startswith("no OpenCL driver is installed")

    def test_a_cache_that_cannot_be_written_does_not_end_the_process(self, opencl):
        code = (
            "import torch; from workers import kernels; print(kernels.create('opencl').silu(torch.zeros(3)).tolist())"
        )
        done = self.child(code, POCL_CACHE_DIR="/proc/none", POLYFLEET_CACHE="/proc/none")
        assert (done.stdout, done.stderr) == ("[0.0, 0.0, 0.0]\n", "")

    def test_nor_does_a_full_disk(self, opencl, monkeypatch):
        opencl.close()
        monkeypatch.setattr(opencl_driver, "MIN_FREE_BYTES", 1 << 60)
        with pytest.raises(KernelsFailed, match=r"program cannot be stored: .* bytes free; .* needed; free disk"):
            opencl.silu(torch.zeros(3))
        monkeypatch.undo()
        assert opencl.silu(torch.zeros(3)).tolist() == [0.0] * 3

    def test_a_fork_is_told_how_to_start_instead(self, opencl):
        code = (
            "import os, torch; from workers import kernels; k = kernels.create('opencl'); k.silu(torch.zeros(3))\n"
            "if not os.fork():\n    try: k.silu(torch.zeros(3))\n    except Exception as e: print(e, flush=True)\n"
            "    os._exit(0)\nos.wait()"
        )
        done = self.child(code)
        assert (
            "this process was forked from one that uses OpenCL; start processes with the method 'spawn'" in done.stdout
        )


BUGS = {
    "the tail of a row is lost": (
        "opencl_rows_items", "if (i < columns) total += load_tail(x + i, columns - i, 0.0f);", "",
        "items", "layernorm-3x13", torch.float32,
    ),
    "the tree leaves out a half": (
        "opencl_tree", "for (int half_of = GROUP / 2; half_of;", "for (int half_of = GROUP / 4; half_of;",
        "groups", "rmsnorm-17x257", torch.float32,
    ),
    "a tile reads beyond the depth": (
        "opencl_products_groups", "bn < columns && bk < depth ?", "bn < columns ?",
        "groups", "matmul-between-nan", torch.float32,
    ),
    "sums are not shrunk when a greater score comes": (
        "opencl_attention_items", "total *= shrink;", "", "items", "attention-decode", torch.float32,
    ),
    "a head takes the wrong group": (
        "opencl_attention_groups", "h / (heads / groups)", "h % groups", "groups", "attention-grouped", torch.float16,
    ),
}  # fmt: skip


@pytest.fixture
def rebuilt(opencl, tmp_path, monkeypatch):
    """`rebuilt(form, file, old, new)`: kernels of sources in which `new` stands for `old`."""

    def build(form, file, old, new):
        shutil.copytree(opencl_driver.SOURCES, tmp_path / "sources")
        source = tmp_path / "sources" / f"{file}.cl"
        assert old in source.read_text(), f"{file}.cl has no such line any more: {old}"
        source.write_text(source.read_text().replace(old, new))
        monkeypatch.setattr(opencl_driver, "SOURCES", tmp_path / "sources")
        return registry.create("opencl", form=form)

    return build


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_fails_a_case_of_the_contract(bug, rebuilt):
    file, old, new, form, name, dtype = BUGS[bug]
    with pytest.raises(AssertionError):
        check(rebuilt(form, file, old, new), named(name), dtype)


def test_a_source_that_does_not_build_is_told_by_its_first_error(opencl, rebuilt, monkeypatch):
    broken = rebuilt("items", "opencl_gates", "long i = get_global_id(0)", "long i = gett_global_id(0)")
    with pytest.raises(KernelsFailed, match=r"does not build opencl_gates.cl: .*gett_global_id"):
        broken.silu(torch.zeros(3))
    monkeypatch.undo()
    assert broken.silu(torch.zeros(3)).tolist() == [0.0] * 3

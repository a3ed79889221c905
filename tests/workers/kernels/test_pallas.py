"""Pallas' kernels beyond the contract: blocks, both forms of rows, memory, planted faults, lowering for TPUs."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_cases import CASES, check, draw

import workers.kernels.sources
from cluster.errors import UserError
from workers import kernels as registry
from workers.errors import KernelsFailed
from workers.kernels.compilation import pallas_blocks as planning
from workers.kernels.dispatch.kernel_choice import get_kernels_info, init_kernels

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "workers" / "kernels" / "sources"
SMALL_BYTES = 160 << 10
"""A budget in which rows of 300 values in float32 do not fit as a whole."""


@pytest.fixture
def pallas(absent):
    if reason := registry.unavailable_reason("pallas"):
        absent("pallas", f"kernels 'pallas' are not available here: {reason}")

    def make(**options):
        return registry.create("pallas", platform="cpu", **options)

    return make


def case(name):
    return next(one for one in CASES if str(one) == name)


class TestBlocks:
    @pytest.mark.parametrize("itemsize", (2, 4))
    @pytest.mark.parametrize("columns", (1, 127, 4096, 5120, 32768, 65537, 131072, 1 << 24))
    def test_blocks_of_rows_are_tiles_within_the_budget(self, columns, itemsize):
        tile = 32 // itemsize
        for rows in (1, 7, 8, 100, 100_000):
            blocks = planning.row_blocks(rows, columns, itemsize, vectors=2)
            assert blocks.vmem_bytes <= planning.BUDGET_BYTES
            assert blocks.width % 128 == 0
            assert blocks.rows == rows < tile or blocks.rows % tile == 0
            assert not blocks.single_pass or blocks.width >= columns

    def test_the_width_of_a_row_decides_how_often_it_is_read(self):
        assert planning.row_blocks(4096, 4096, 4) == planning.RowBlocks(64, 4096, True, 7_405_568)
        assert planning.row_blocks(4096, 32768, 4).single_pass
        wide = planning.row_blocks(4096, 131072, 4)
        assert (wide.rows, wide.width, wide.single_pass) == (8, 8192, False)

    def test_blocks_of_attention_become_smaller_with_wider_heads(self):
        def sizes(width, itemsize=2):
            blocks = planning.attention_blocks(4096, 4096, width, width, itemsize)
            assert blocks.vmem_bytes <= planning.BUDGET_BYTES
            return blocks.queries, blocks.keys

        assert sizes(128) == (256, 512)
        assert sizes(2048, 4) == (128, 128)
        assert planning.attention_blocks(1, 9, 64, 64, 2).queries == 1

    def test_a_block_that_does_not_fit_is_never_launched(self, pallas):
        with pytest.raises(
            UserError, match=r"heads are 65536 and 8 wide: a block needs \d+ bytes of VMEM.*not launched"
        ):
            planning.attention_blocks(16, 128, 65536, 8, 4)
        kernels = pallas(vmem_bytes=SMALL_BYTES)
        kernels.driver.run = None  # nothing may be compiled or launched
        with pytest.raises(UserError, match="heads are 300 and 300 wide"):
            kernels.attention(draw(1, 1, 2, 300), draw(1, 1, 3, 300), draw(1, 1, 3, 300))
        with pytest.raises(UserError, match="a tile of 8 rows needs 36864 bytes of VMEM, the budget is 30000"):
            pallas(vmem_bytes=30_000).softmax(draw(20, 300))
        x = draw(2, 300)
        torch.testing.assert_close(pallas(vmem_bytes=SMALL_BYTES).softmax(x), x.softmax(-1))


class TestWideRows:
    """The contract reads rows of up to 32,768 values as a whole: here all are read twice."""

    @pytest.mark.parametrize(
        "name",
        (
            *("rmsnorm-3x5120", "rmsnorm-17x257", "layernorm-far-from-zero", "layernorm-no-bias", "softmax-far-apart"),
            *("softmax-one-minus-inf", "softmax-row-of-minus-inf", "softmax-one-inf"),
        ),
    )
    def test_they_are_right_in_blocks_of_few_columns(self, pallas, monkeypatch, name):
        def narrow(rows, columns, *others):
            return planning.RowBlocks(min(rows, 8), 128 if columns < 1000 else 1024, False, 0)

        monkeypatch.setattr(planning, "row_blocks", narrow)
        check(pallas(), case(name), torch.float32)

    def test_a_row_that_starts_with_a_block_of_minus_inf_has_shares(self, pallas):
        x = draw(9, 20000)
        x[3, :19000] = float("-inf")
        kernels = pallas(vmem_bytes=SMALL_BYTES)
        assert not planning.row_blocks(9, 20000, 4, 0, kernels.vmem_bytes).single_pass
        torch.testing.assert_close(kernels.softmax(x), x.softmax(-1))


class TestMemory:
    def test_arrays_stay_on_the_device(self, pallas):
        kernels = pallas()
        x, weight = draw(2, 3, 70).half(), draw(70).half()
        on_device = kernels.to_device(x)
        normed = kernels.rmsnorm(on_device, kernels.to_device(weight))
        assert (tuple(normed.shape), normed.dtype) == ((2, 3, 70), torch.float16)
        assert torch.equal(kernels.to_host(kernels.silu(normed)), kernels.silu(kernels.rmsnorm(x, weight)))
        assert kernels.softmax(on_device, out=on_device) is on_device
        assert torch.equal(kernels.to_host(on_device), kernels.softmax(x))
        assert kernels.to_host(kernels.softmax(kernels.to_device(x[:0]))).shape == (0, 3, 70)

    def test_a_copy_on_the_device_does_not_follow_torchs_memory(self, pallas):
        kernels, x = pallas(), torch.zeros(4, 128)
        on_device = kernels.to_device(x)
        x.fill_(1.0)
        assert torch.equal(kernels.to_host(on_device), torch.zeros(4, 128))

    def test_arrays_of_other_kernels_are_refused_or_moved(self, pallas):
        first, second = pallas(), pallas()
        with pytest.raises(UserError, match="is on the device of other kernels"):
            second.softmax(first.to_device(draw(2, 3)))
        assert torch.equal(second.to_host(second.to_device(first.to_device(draw(2, 3)))), draw(2, 3))

    def test_logarithms_of_sums_are_returned_for_numpy_and_for_resident_arrays(self, pallas):
        kernels, q, k = pallas(), draw(2, 3, 16), draw(2, 5, 16)
        want = (q @ k.mT / 4).logsumexp(-1)
        result, sums = kernels.attention(q.numpy(), k.numpy(), k.numpy(), return_lse=True)
        assert isinstance(result, np.ndarray)
        torch.testing.assert_close(torch.as_tensor(sums), want)
        there = [kernels.to_device(one) for one in (q, k, k)]
        torch.testing.assert_close(kernels.to_host(kernels.attention(*there, return_lse=True)[1]), want)

    @pytest.mark.parametrize("width", (0, 8))
    def test_without_keys_results_are_zero_and_without_width_scores_are(self, pallas, width):
        values = draw(1, 1, 4, 3)
        found = pallas().attention(torch.zeros(1, 1, 2, width), torch.zeros(1, 1, 4, width), values)
        torch.testing.assert_close(found, values.mean(2, keepdim=True).expand(1, 1, 2, 3))
        nothing = pallas().attention(
            torch.zeros(1, 1, 2, width), torch.zeros(1, 1, 0, width), values[:, :, :0], return_lse=True
        )
        assert nothing[0].eq(0).all() and nothing[1].eq(float("-inf")).all()


ROWS, SUMS, ATTENTION = "pallas_rows", "pallas_sums", "pallas_attention"
INSIDE = "inside = is_below(x_ref.shape, 1, 0, length)"
KEYS = "is_visible = is_below(scores.shape, 1, first_key, keys)"
VALUES = "values = jnp.where(is_below(values.shape, 0, first_key, keys), values, jnp.zeros_like(values))"
FAULTS = {
    "the tail of a row is not masked": (ROWS, INSIDE, INSIDE.replace("length)", "9999)"), "softmax-3x13"),
    "the padding is counted": (
        ROWS,
        "sum(x * x, 1, keepdims=True) / length",
        "mean(x * x, 1, keepdims=True)",
        "rmsnorm-3x13",
    ),
    "a block is not read": (
        SUMS,
        "squares_ref[...] += jnp.sum(x * x",
        "squares_ref[...] += (j < 7) * jnp.sum(x * x",
        "rmsnorm-2x65537",
    ),
    "sums of a block are not shifted": (
        SUMS,
        "total_ref[...] * jnp.exp(before - shift)",
        "total_ref[...]",
        "softmax-2x65537",
    ),
    "keys beyond the last have weight": (ATTENTION, KEYS, KEYS.replace("keys)", "9999)"), "attention-small"),
    "values beyond the last are read": (ATTENTION, VALUES, "", "attention-small"),
    "a head takes the wrong group": (ATTENTION, "lax.div(h", "lax.rem(h", "attention-grouped"),
    "causal counts from the beginning": (ATTENTION, "past = keys - length", "past = 0", "attention-causal-longer-past"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails_a_case(pallas, monkeypatch, tmp_path, fault):
    file, old, new, name = FAULTS[fault]
    text = (SOURCES / f"{file}.py").read_text()
    assert old in text, f"{file}.py has no such line any more: {old}"
    (tmp_path / f"{file}.py").write_text(text.replace(old, new))
    for module, folder in ((file, tmp_path), *([(ROWS, SOURCES)] if file == SUMS else [])):
        full_name = f"workers.kernels.sources.{module}"
        spec = importlib.util.spec_from_file_location(full_name, folder / f"{module}.py")
        made = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, full_name, made)
        monkeypatch.setattr(workers.kernels.sources, module, made, raising=False)
        spec.loader.exec_module(made)
    with pytest.raises(AssertionError):
        check(pallas(), case(name), torch.float32)


class TestWhatAUserIsTold:
    def test_it_is_known_and_interpreted(self, pallas):
        told = get_kernels_info("pallas")
        assert (told["available"], told["driver"], told["platform"]) == (True, "jax", "cpu")
        assert told["interpreted"] is init_kernels("pallas").interpreted is True

    def test_a_platform_that_is_not_there_or_unknown(self, pallas):
        with pytest.raises(UserError, match="unknown platform 'tpuu'; did you mean 'tpu'"):
            registry.create("pallas", platform="tpuu")
        with pytest.raises(UserError, match="do not compute on meta"):
            pallas(device="meta")

    @pytest.mark.parametrize("given", (0, True, 1.5, 16 << 20))
    def test_a_budget_must_leave_room_for_the_compiler(self, pallas, given):
        with pytest.raises(UserError, match=r"vmem_bytes is .*; write an integer from 1 to 16777215"):
            pallas(vmem_bytes=given)

    def test_an_error_of_jax_is_told_and_the_next_call_is_right(self, pallas, monkeypatch):
        kernels, x = pallas(), draw(3, 8)

        def fails(*arrays, **constants):
            raise RuntimeError("RESOURCE_EXHAUSTED: 3.0G of HBM\nmore")

        with (
            monkeypatch.context() as broken,
            pytest.raises(KernelsFailed, match=r"out of memory: .*3.0G of HBM; call it"),
        ):
            broken.setattr(kernels.driver, "run", fails)
            kernels.softmax(x)
        torch.testing.assert_close(kernels.softmax(x), x.softmax(-1))
        kernels.close()
        torch.testing.assert_close(kernels.softmax(x), x.softmax(-1))

    def test_a_dimension_beyond_jaxs_indices_is_refused(self, pallas):
        with pytest.raises(KernelsFailed, match=r"dimension of \[2147483648\] is greater than 2147483647"):
            pallas()._imported(torch.empty(1).expand(1 << 31))


def in_a_process(*words, **variables):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | variables
    ran = subprocess.run(
        [sys.executable, "-W", "error", *words], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


ALONE = """
import os, sys, torch, warnings
import workers.kernels.implementations.pallas
print("jax" in sys.modules)
from workers.kernels import create, unavailable_reason
print(repr(unavailable_reason("pallas")))
kernels = create("pallas", platform="cpu")
kernels.softmax(torch.zeros(2, 4))
import jax
kernels.attention(torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 0, 8), torch.zeros(1, 1, 0, 3))  # uses no array
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized(), jax.config.jax_platforms or "any", jax.config.jax_enable_x64)
y = kernels.softmax(jax.numpy.zeros((2, 4)))
print(type(y).__name__, y.sum(), flush=True)
try:
    create("pallas", platform="tpu")
except Exception as e:
    print(type(e).__name__, str(e)[:67])
sys.stdout.flush()
warnings.simplefilter("ignore")  # JAX's own, of forks
if not os.fork():
    try:
        kernels.silu(torch.zeros(3))
    except Exception as e:
        print(e, flush=True)
    os._exit(0)
os.wait()
"""


class TestProcesses:
    def test_nothing_of_jax_is_global_and_a_fork_is_refused(self, pallas):
        """JAX is not imported with the file, and no platform of its own is started by a call: on a machine with a GPU
        that would take its memory. An array of JAX's does, and is answered with one."""
        told = in_a_process("-c", ALONE, JAX_PLATFORMS="cpu").splitlines()
        assert told[:4] == ["False", "''", "False cpu False", "ArrayImpl 2.0"]
        assert told[4].startswith("KernelsUnavailable kernels 'pallas' are not available here: JAX cannot use a TPU")
        assert "forked from one that uses JAX; start processes with the method 'spawn'" in told[5]

    def test_every_kernel_is_lowered_for_tpus(self, pallas):
        told = {
            tuple(line.split()) for line in in_a_process("tests/pallas_lowering.py", JAX_PLATFORMS="cpu").splitlines()
        }
        of_pallas = {line for line in told if line[0] == "pallas"}
        assert {line[1] for line in of_pallas} == {"rmsnorm", "layernorm", "softmax", "attention"}
        for name in ("rmsnorm", "layernorm", "softmax", "attention"):
            assert {line[2] for line in of_pallas if line[1] == name} == {"float32", "bfloat16"}
        assert not any("float16" in line for line in of_pallas), "Mosaic cannot load float16"
        others = {"matmul", "matmul_vec", "weighted_sum_rows", "scores", "silu", "swiglu", "rope"}
        assert others <= {line[1] for line in told if line[0] == "xla"}

"""Triton's kernels beyond the contract: their forms, planted faults, and what a user is told."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from kernel_cases import CASES, Case, check, draw, judge

from cluster.errors import UserError
from workers import kernels as registry
from workers.errors import KernelsFailed
from workers.kernels import formulas
from workers.kernels.compilation import triton_table as table
from workers.kernels.drivers import triton_launch
from workers.measurement.accuracy import Rounding

pytestmark = pytest.mark.full

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=("f32", "f16", "bf16"))
BEFORE_CLUSTERS, WITH_CLUSTERS = (3, 7), (3, 8)
SM_90, SM_80, MI300 = (table.TARGETS[name] for name in ("sm_90", "sm_80", "gfx942"))


@pytest.fixture
def triton(absent):
    if not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("these tests step through kernels; a GPU's are the contract's, with -m gpu")
    if reason := registry.unavailable_reason("triton"):
        absent("triton", f"kernels 'triton' are not available here: {reason}")

    def make(**options):
        return registry.create("triton", **options)

    return make


def case(name: str) -> Case:
    return next(one for one in CASES if str(one) == name)


# Forms


@pytest.mark.parametrize("operation", ("rmsnorm", "layernorm", "softmax"))
def test_the_width_of_a_row_decides_the_form(operation):
    def form(columns, on=SM_90, triton=WITH_CLUSTERS):
        found = table.rows(operation, columns, on, triton)
        return found.kernel.removeprefix(f"{operation}_"), *found.blocks, found.ctas

    assert form(1) == ("rows", 8 if operation == "rmsnorm" else 32, 128, 1)
    assert form(3008) == ("rows", 1, 4096, 1)
    assert form(32768) == ("rows", 1, 32768, 1)
    assert form(65536) == ("cluster", 65536, 4)
    assert form(131072) == ("cluster", 131072, 8)
    assert form(131088) == ("loop", 4096, 1)


def test_rows_that_are_not_multiples_of_16_bytes_are_read_twice_sooner():
    """Each value has an address of its own, and registers for it."""
    assert table.rows("rmsnorm", 1023, SM_90, WITH_CLUSTERS).kernel == "rmsnorm_rows"
    assert table.rows("rmsnorm", 1025, SM_90, WITH_CLUSTERS).kernel == "rmsnorm_loop"
    assert table.rows("rmsnorm", 65537, SM_90, WITH_CLUSTERS).kernel == "rmsnorm_loop"
    assert table.rows("rmsnorm_backward", 2049, SM_90, WITH_CLUSTERS).kernel == "rmsnorm_backward_loop"


@pytest.mark.parametrize("columns", (40000, 65536, 131072))
def test_no_cluster_is_chosen_before_triton_3_8_or_where_a_target_has_none(columns):
    for on, version in ((SM_90, BEFORE_CLUSTERS), (SM_80, WITH_CLUSTERS), (MI300, WITH_CLUSTERS)):
        assert table.rows("rmsnorm", columns, on, version).ctas == 1
        assert table.rows("rmsnorm", columns, on, version).kernel == "rmsnorm_loop"


@dtypes
@pytest.mark.parametrize("operation", ("rmsnorm", "layernorm", "softmax"))
def test_wide_rows_are_right_in_the_form_of_clusters(triton, monkeypatch, operation, dtype):
    """Also those of 65,537 columns, which a GPU's lines would have read twice."""
    kernels = triton()
    kernels.version = WITH_CLUSTERS
    assert kernels.rows(operation, 131072).ctas == 8
    check(kernels, case(f"{operation}-1x131072"), dtype)
    monkeypatch.setattr(table, "ALIGNED", 1)
    kernels.close()
    assert kernels.rows(operation, 65537).ctas == 8
    check(kernels, case(f"{operation}-2x65537"), dtype)


@dtypes
@pytest.mark.parametrize("shape", ((11, 5000), (3, 20000)), ids=("several-blocks", "wide"))
def test_gradients_are_right_where_rows_are_read_twice(triton, shape, dtype):
    """On xpu's lines rows beyond 2048 columns are; 4 programs take 11 rows, two at a time."""
    kernels = triton(target="xpu")
    assert kernels.rows("layernorm_backward", shape[-1]).kernel == "layernorm_backward_loop"
    x, g, w = (draw(*shape) + 3).to(dtype), draw(*shape, 1)[..., 0].to(dtype), draw(shape[-1]).to(dtype)
    wide = [t.double() for t in (g, x, w)]
    rounding = Rounding(dtype, shape[-1], 6)
    have = kernels.rmsnorm_backward(g, x, w, offset=1.0)
    for a, b in zip(have, formulas.rmsnorm(*wide, 1e-6, 1.0), strict=True):
        judge(kernels, a, b, rounding, "rmsnorm")
    have = kernels.layernorm_backward(g, x, w, w)
    for a, b in zip(have, formulas.layernorm(*wide, True, 1e-5), strict=True):
        judge(kernels, a, b, rounding, "layernorm")
    y = x.softmax(-1)
    judge(kernels, kernels.softmax_backward(g, y), formulas.softmax(wide[0], y.double()), rounding, "softmax")


def test_gradients_of_a_weight_repeat_bit_for_bit(triton):
    kernels = triton()
    x, g, w = draw(300, 200), draw(300, 200, 1)[..., 0], draw(200)
    first, second = (kernels.layernorm_backward(g, x, w, w) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("target", ("sm_80", "gfx942", "xpu"))
def test_other_targets_lines_of_the_table_are_right_too(triton, target):
    kernels = triton(target=target)
    for name in ("rmsnorm-17x257", "softmax-2x16384", "silu-17x257", "matmul-130x70x129", "attention-grouped"):
        check(kernels, case(name), torch.float16)


# Planted faults: each in the text of a source


def planted(monkeypatch, tmp_path, module, was, now):
    """The file with `was` replaced by `now`, taken for the real one."""
    text = (triton_launch.SOURCES / f"{module}.py").read_text()
    assert was in text
    path = tmp_path / f"{module}.py"
    path.write_text(text.replace(was, now))
    name = f"workers.kernels.sources.{module}"
    spec = importlib.util.spec_from_file_location(name, path)
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, made)
    spec.loader.exec_module(made)


NORMS, ATTENTION = "triton_norms", "triton_attention"
INSIDE_MORE = Case("inside-more", "rmsnorm", lambda: (draw(300, 40)[:5], draw(400)[:40]), depth=40)
"""Rows in front of others, so that reading on past the last column finds values, and no fault of memory."""
LARGE = Case("large", "rmsnorm", lambda: (draw(3, 40, scale=300.0), draw(40)), depth=40)
LOAD = "x_RC = tl.load(x + at, mask=seen, other=0.0).to(tl.float32)\n    scale_R"
LOOP = "for start in range(0, C, BLOCK_C)"
PAST = "attention-causal-longer-past"
FAULTS = {
    "columns-not-masked": (NORMS, LOAD, LOAD.replace("seen", "(rows < R)[:, None]"), INSIDE_MORE, 0),
    "lost-row": (NORMS, "(rows < R)[:, None]", "(rows < R - 1)[:, None]", "rmsnorm-17x257", 0),
    "sum-in-float16": (NORMS, LOAD, LOAD.replace(".to(tl.float32)", ""), LARGE, 1),
    "last-chunk-lost": (NORMS, LOOP, LOOP.replace("C,", "C - BLOCK_C,"), "rmsnorm-2x65537", 0),
    "wrong-kept-head": (ATTENTION, "k += head // share", "k += head % share", "attention-grouped", 0),
    "causal-from-the-beginning": (ATTENTION, "keeps <= asks + S - T", "keeps <= asks", PAST, 0),
    "sums-not-rescaled": (ATTENTION, "sums * shrink[:, None]", "sums", "attention-decode", 0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails_a_case(triton, monkeypatch, tmp_path, fault):
    module, was, now, one, dtype = FAULTS[fault]
    one = case(one) if isinstance(one, str) else one
    check(triton(), one, DTYPES[dtype])
    planted(monkeypatch, tmp_path, module, was, now)
    with pytest.raises(AssertionError):
        check(triton(), one, DTYPES[dtype])


def test_a_planted_sum_of_a_program_alone_fails_the_gradient_of_a_weight(triton, monkeypatch, tmp_path):
    """As if one of the persistent programs' partial sums were lost."""
    g, x, w = draw(70, 130, 1)[..., 0], draw(70, 130), draw(130)
    want = formulas.rmsnorm(g.double(), x.double(), w.double(), 1e-6, 0.0)[1]
    judge(triton(), triton().rmsnorm_backward(g, x, w)[1], want, Rounding(torch.float32, 130, 6), "weight")
    planted(monkeypatch, tmp_path, "triton_norms_backward", "(rows < P)[:, None]", "(rows < P - 1)[:, None]")
    with pytest.raises(AssertionError):
        judge(triton(), triton().rmsnorm_backward(g, x, w)[1], want, Rounding(torch.float32, 130, 6), "weight")


# What a user is told


def test_what_triton_computes_on_is_told(triton):
    kernels = triton()
    told = kernels.device_info()
    assert (told["device"], told["driver"], told["interpreted"], kernels.interpreted) == ("cpu", "triton", True, True)
    assert "rmsnorm" in kernels.own_gradients
    with pytest.raises(UserError, match="do not compute on cuda"):
        triton(device="cuda")
    with pytest.raises(UserError, match="unknown target 'sm_91'"):
        triton(target="sm_91")


def test_a_head_too_wide_is_refused_and_the_next_call_is_right(triton):
    kernels = triton()
    with pytest.raises(UserError, match="heads are 300 wide"):
        kernels.attention(draw(1, 1, 2, 300), draw(1, 1, 3, 300), draw(1, 1, 3, 300))
    check(kernels, case("attention-small"), torch.float32)


def test_more_programs_than_a_grid_has_are_refused(triton):
    kernels = triton()
    with pytest.raises(KernelsFailed, match="2147483648 programs"):
        kernels._matmul_vec(
            torch.empty(1, device="meta").expand(1 << 31, 1, 1),
            torch.empty(1, device="meta").expand(1 << 31, 1),
            torch.empty(1, device="meta").expand(1 << 31, 1),
        )


def in_a_process(code: str, **environment: str) -> str:
    given = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = os.pathsep.join(filter(None, sys.path))
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=given | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


REASON = "from workers import kernels; print(kernels.unavailable_reason('triton'))"


def test_without_a_gpu_and_the_interpreter_it_says_what_to_set(triton):
    assert "set TRITON_INTERPRET=1 before Python starts" in in_a_process(REASON)


def test_a_variable_set_too_late_is_told(triton):
    late = "import os, triton.language; os.environ['TRITON_INTERPRET'] = '1'; "
    assert "imported Triton without TRITON_INTERPRET" in in_a_process(late + REASON)


def test_importing_the_implementation_imports_no_triton(triton):
    code = "import sys, workers.kernels.implementations.triton; print('triton' in sys.modules)"
    assert in_a_process(code).strip() == "False"

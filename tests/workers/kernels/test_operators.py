"""The operators of torch.library: gradients, tracing, compiling, autocast, and what they refuse."""

import contextlib

import pytest
import torch
from functorch.compile import make_boxed_func
from kernel_cases import angles, draw
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.library import opcheck
from torch.nn import functional as F

from cluster.errors import UserError
from workers.kernels.dispatch import operators
from workers.kernels.formulas import rotated

pytestmark = pytest.mark.full

OPS = torch.ops.polyfleet
KERNELS = "numpy"  # its gradients are formulas in float64: what is tested here is what lies around them


def learning(*shape: int) -> torch.Tensor:
    return draw(*shape).double().requires_grad_()


def cases():
    """Operator, and arguments in float64 of which those with gradients are asked for them."""
    cos, sin = (table.double() for table in angles(9, 4))
    mask, kept = draw(2, 1, 5, 7) > -0.7, learning(2, 2, 7, 8)
    return {
        "rmsnorm": (learning(2, 3, 8), learning(8), 1e-6, 1.0, False, KERNELS),
        "rmsnorm-without-weight": (learning(5, 8), None, 1e-6, 0.0, False, KERNELS),
        "layernorm": (learning(2, 3, 8), learning(8), learning(8), 1e-5, KERNELS),
        "layernorm-bare": (learning(5, 8), None, None, 1e-5, KERNELS),
        "softmax": (learning(2, 3, 8), KERNELS),
        "silu": (learning(2, 3, 8), KERNELS),
        "swiglu": (learning(2, 3, 8), learning(2, 3, 8), KERNELS),
        "apply_rope": (learning(2, 5, 10), cos, sin, 3, "pairs", KERNELS),
        "matmul": (learning(2, 1, 3, 4), learning(5, 4, 6), KERNELS),
        "matmul-one-matrix": (learning(2, 3, 4), learning(4, 6), KERNELS),
        "attention": (learning(2, 4, 5, 8), kept, kept, mask, 0.3, False, True, KERNELS),
        "attention-causal": (learning(2, 2, 5, 8), kept, kept, None, 0.3, True, True, KERNELS),
    }  # fmt: skip


every_case = pytest.mark.parametrize("name", list(cases()))


def operator(name: str):
    return getattr(OPS, name.partition("-")[0]).default


@every_case
def test_torch_finds_nothing_wrong_with_schema_gradients_and_tracing(name):
    arguments = cases()[name]
    opcheck(operator(name), arguments)
    with torch.no_grad():
        opcheck(operator(name), tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in arguments))


@every_case
def test_gradients_are_those_of_small_steps(name):
    def first(*arguments):
        answer = operator(name)(*arguments)
        return answer if isinstance(answer, torch.Tensor) else answer[0]

    assert torch.autograd.gradcheck(first, cases()[name])


@every_case
def test_gradients_of_gradients_are_refused_with_a_reason(name):
    arguments = cases()[name]
    answer = operator(name)(*arguments)
    answer = answer if isinstance(answer, torch.Tensor) else answer[0]
    wanted = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
    weights = draw(*answer.shape).double().requires_grad_()
    grads = torch.autograd.grad((answer * weights).sum(), wanted, create_graph=True)
    with pytest.raises(UserError, match=r"the gradient of \w+'s gradient is not computed; use kernels='torch(:math)?'"):
        torch.autograd.grad(sum(g.square().sum() for g in grads), [*wanted, weights])


def block(x, w, kernels):
    """Operators among what a compiler fuses, with a view and a transposition between them."""
    normed = operators.rmsnorm(x * 2, w, kernels=kernels)
    q = operators.apply_rope(normed.unflatten(-1, (2, 8)).transpose(1, 2), *angles(6, 4), kernels=kernels)
    seen = operators.attention(q, q, q, causal=True, kernels=kernels).transpose(1, 2).flatten(-2)
    gated = operators.swiglu(seen, operators.silu(seen, kernels=kernels), kernels=kernels)
    return operators.softmax(operators.matmul(gated, w.outer(w), kernels=kernels), kernels=kernels) + x


@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
def test_a_compiled_block_has_no_graph_break_and_the_gradients_of_the_eager_one(dynamic):
    x, w = draw(2, 6, 16).requires_grad_(), draw(16).requires_grad_()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    results = []
    for run, kernels in ((compiled, "torch"), (compiled, KERNELS), (block, KERNELS), (block, "torch")):
        y = run(x, w, kernels)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, w))))
    for have in results[:-1]:
        for a, b in zip(have, results[-1], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


def test_a_compiled_function_has_the_kernel_of_attention_that_is_named():
    q, targets = draw(1, 2, 5, 8).requires_grad_(), set()

    def compiler(graph, _inputs):
        targets.update(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    for name, has_flash in (("torch", True), ("torch:flash", True), ("torch:math", False)):
        call = lambda q, name=name: operators.attention(q, q, q, kernels=name).sum()  # noqa: E731
        compiled = torch.compile(call, fullgraph=True, backend=aot_autograd(fw_compiler=compiler))
        targets.clear()
        torch.testing.assert_close(compiled(q), call(q))
        compiled(q).backward()
        assert any("flash_attention" in target for target in targets) == has_flash, targets


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # inductor imports it
def test_inductor_compiles_a_block_and_its_backward():
    x, w = draw(2, 6, 16).requires_grad_(), draw(16).requires_grad_()
    y = torch.compile(block, fullgraph=True)(x, w, KERNELS)
    want = block(x, w, "torch")
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-6)
    have, wanted = (torch.autograd.grad(r.square().sum(), (x, w)) for r in (y, want))
    for a, b in zip(have, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


def test_functions_without_a_dispatcher_compute_as_those_with_one():
    x, w, b = draw(5, 8), draw(8), draw(8, 1)[:, 0]
    cos, sin = angles(5, 4)
    pairs = [
        (operators.rmsnorm(x, w, offset=1.0, kernels=KERNELS), OPS.rmsnorm(x, w, 1e-6, 1.0, False, KERNELS)),
        (operators.layernorm(x, w, b, kernels=KERNELS), OPS.layernorm(x, w, b, 1e-5, KERNELS)),
        (operators.softmax(x, kernels=KERNELS), OPS.softmax(x, KERNELS)),
        (operators.silu(x, kernels=KERNELS), OPS.silu(x, KERNELS)),
        (operators.swiglu(x, x + 1, kernels=KERNELS), OPS.swiglu(x, x + 1, KERNELS)),
        (operators.apply_rope(x, cos, sin, kernels=KERNELS), OPS.apply_rope(x, cos, sin, 0, "halves", KERNELS)),
        (operators.matmul(x, x.T, kernels=KERNELS), OPS.matmul(x, x.T, KERNELS)),
    ]
    q = draw(2, 3, 5, 8)
    pairs.append((operators.attention(q, q, q, kernels=KERNELS), OPS.attention(q, q, q, None, 8**-0.5, False, False,
                                                                               KERNELS)[0]))  # fmt: skip
    for have, want in pairs:
        assert torch.equal(have, want)


def test_torchs_own_are_what_torch_computes_and_a_compiler_sees_through_them():
    x, w, q = draw(5, 8), draw(8), draw(2, 3, 5, 8)
    assert torch.equal(operators.rmsnorm(x, w, kernels="torch"), F.rms_norm(x, (8,), w, 1e-6))
    assert torch.equal(operators.layernorm(x, w, kernels="torch"), F.layer_norm(x, (8,), w))
    cos, sin = angles(5, 4)
    assert torch.equal(operators.apply_rope(q, cos, sin, kernels="torch"), rotated(q, cos, sin, False))
    seen = []
    torch.compile(
        lambda x, w: operators.rmsnorm(x, w, kernels="torch"),
        backend=lambda graph, _: seen.extend(str(n.target) for n in graph.graph.nodes) or graph,
    )(x, w)
    assert not any("polyfleet" in target for target in seen)


def test_autocast_lowers_products_and_leaves_norms_as_torch_does_on_the_cpu():
    x, w, q = draw(5, 8), draw(8), draw(2, 3, 5, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert operators.matmul(x, x.T, kernels=KERNELS).dtype == torch.matmul(x, x.T).dtype == torch.bfloat16
        assert operators.attention(q, q, q, kernels=KERNELS).dtype == torch.bfloat16
        assert operators.rmsnorm(x, w, kernels=KERNELS).dtype == F.rms_norm(x, (8,), w).dtype
        assert operators.layernorm(x, w, kernels=KERNELS).dtype == F.layer_norm(x, (8,), w).dtype
        assert operators.softmax(x, kernels=KERNELS).dtype == x.softmax(-1).dtype
    assert operators.matmul(x, x.T, kernels=KERNELS).dtype == torch.float32


def test_autocast_gives_gradients_in_the_dtype_of_the_weights():
    x, w = draw(5, 8), draw(8, 3).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = operators.matmul(x, w, kernels=KERNELS)
    y.float().sum().backward()
    assert w.grad is not None and w.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: operators.rmsnorm(draw(5, 8), draw(7), kernels=KERNELS), r"weight has shape \[7\]; pass \[8\]"),
        (lambda: operators.rmsnorm(draw(5, 8), kernels="nunpy"), "unknown kernels 'nunpy'; did you mean 'numpy'"),
        (lambda: OPS.rmsnorm(draw(5, 8).requires_grad_(), None, 1e-6, 0.0, False, "nunpy"), "did you mean 'numpy'"),
        (lambda: operators.silu(torch.ones(3, dtype=torch.int64), kernels=KERNELS), "x is in int64"),
    ],
)
def test_wrong_calls_say_what_is_wrong(call, told):
    with pytest.raises(UserError, match=told):
        call()


def test_a_mask_that_is_added_and_tables_that_learn_are_refused():
    q, mask = learning(1, 2, 3, 8), learning(3, 3)
    with pytest.raises(UserError, match="the mask of attention has no gradient"):
        operators.attention(q, q, q, mask=mask, kernels=KERNELS).sum().backward()
    cos, sin = (table.double().requires_grad_() for table in angles(3, 4))
    with pytest.raises(UserError, match="the tables of apply_rope have no gradient"):
        operators.apply_rope(learning(2, 3, 8), cos, sin, kernels=KERNELS).sum().backward()


def test_a_model_that_holds_an_operator_is_exported():
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(draw(8))

        def forward(self, x):
            return operators.rmsnorm(x, self.weight, kernels=KERNELS)

    x = draw(5, 8)
    exported = torch.export.export(Norm(), (x,), strict=False)
    torch.testing.assert_close(exported.module()(x), F.rms_norm(x, (8,), draw(8), 1e-6))


def test_what_is_traced_mapped_or_cast_goes_through_the_dispatcher():
    x = draw(5, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not operators.can_call_directly(x)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert not operators.can_call_directly(x)
    assert operators.can_call_directly(x) and not operators.can_call_directly(x.requires_grad_())
    with contextlib.suppress(RuntimeError), torch.no_grad():  # mapping an operator without a rule is torch's to refuse
        torch.vmap(lambda row: operators.silu(row, kernels=KERNELS))(x)

"""torch's kernels for attention: the fastest measured one computes a class of shapes, forward and backward."""

import pytest
import torch
from kernel_cases import draw
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from cluster.errors import UserError
from workers import init_kernels
from workers import kernels as registry
from workers.kernels import sdpa
from workers.kernels.dispatch import comparison, operators, tuner
from workers.kernels.dispatch.attention_choice import measured_order
from workers.kernels.dispatch.fastest import kind_of, torch_variants
from workers.kernels.dispatch.probes import Probe
from workers.kernels.dispatch.tuner import KernelMeasurement, Situation, software_of

# The profiler's own, of some releases of torch.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
CPU = torch.device("cpu")
FLASH, MATH = "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_attention_math"
FLASH_BACKWARD = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"


@pytest.fixture(autouse=True)
def nothing_is_measured(home):
    operators.definition._KERNELS.clear()  # operators read measurements once per process
    sdpa.usable(CPU)  # calls each kernel once per process; the calls of a test alone are compared
    yield
    operators.definition._KERNELS.clear()


def store(kernels, speedup=2.0, shapes="prefill-s256-d16", gradient=False, dtype="float32", right=True):
    situation = Situation(kind_of(CPU), "attention", dtype, shapes, gradient)
    software = software_of(registry.create(kernels))
    low, high = speedup * 0.9, speedup * 1.1
    assert tuner.store_measurement(KernelMeasurement(situation, kernels, software, speedup, low, high, right))


def kernels_used(call):
    with profile(activities=[ProfilerActivity.CPU]) as events:
        call()
    return {event.key for event in events.key_averages()} & {FLASH, MATH, FLASH_BACKWARD}


def heads(tokens=32, width=16, learning=False):
    return draw(1, 2, tokens, width).requires_grad_(learning)


def train(kernels, q):
    operators.attention(q, q, q, causal=True, kernels=kernels).sum().backward()


def test_a_cpu_has_two_of_torchs_kernels_and_each_can_be_preferred():
    assert sdpa.usable(CPU) == ("flash", "math") and torch_variants(CPU) == ("torch:flash", "torch:math")
    assert set(registry.VARIANTS["torch"]) == set(sdpa.SDPA)
    q = heads()
    for name, used in (("torch:flash", FLASH), ("torch:math", MATH), ("torch:cudnn", FLASH)):
        kernels = init_kernels(name)
        assert kernels.name == name and kernels_used(lambda k=kernels: k.attention(q, q, q)) == {used}
        torch.testing.assert_close(kernels.attention(q, q, q), F.scaled_dot_product_attention(q, q, q))


def test_an_unknown_variant_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match="unknown kernels 'torch:flsh'; did you mean 'torch:flash'"):
        init_kernels("torch:flsh")
    with pytest.raises(UserError, match="unknown kernels 'numpy:flash'"):
        init_kernels("numpy:flash")


@pytest.mark.parametrize("name", ("torch", "auto"))
def test_without_measurements_torchs_order_decides(name):
    q = heads(learning=True)
    assert kernels_used(lambda: init_kernels(name).attention(*[q.detach()] * 3)) == {FLASH}
    assert kernels_used(lambda: train(name, q)) == {FLASH, FLASH_BACKWARD}


@pytest.mark.parametrize("name", ("torch", "auto"))
def test_the_fastest_measured_kernel_computes_its_class_of_shapes_only(name):
    store("torch:math")
    kernels = init_kernels(name)
    for q, used in ((heads(), MATH), (heads(width=32), FLASH), (heads(tokens=1), FLASH), (heads().bfloat16(), FLASH)):
        assert kernels_used(lambda q=q: kernels.attention(q, q, q)) == {used}
        assert kernels_used(lambda q=q: operators.attention(q, q, q, kernels=name)) == {used}


@pytest.mark.parametrize("name", ("torch", "auto"))
def test_a_gradient_is_computed_by_the_kernel_of_its_forward(name):
    store("torch:math", shapes="prefill-s512-d16")
    store("torch:math", gradient=True)
    for tokens, used in ((32, {MATH}), (300, {FLASH, FLASH_BACKWARD})):
        q = heads(tokens, learning=True)
        assert kernels_used(lambda q=q: train(name, q)) == used
        with torch.autocast("cpu", dtype=torch.bfloat16):  # of bfloat16 nothing was measured
            assert kernels_used(lambda q=q: train(name, q)) == {FLASH, FLASH_BACKWARD}


def test_the_gradient_of_the_contract_uses_the_choice_for_gradients():
    store("torch:math", gradient=True)
    q, kernels = heads(), init_kernels("torch")
    result, lse = kernels.attention(q, q, q, return_lse=True)
    assert kernels_used(lambda: kernels.attention_backward(q, q, q, q, result, lse)) == {MATH}


def test_what_is_slower_or_wrong_is_not_chosen():
    store("torch:math", 0.5)
    store("torch:math", right=False, shapes="prefill-s512-d16")
    for q in (heads(), heads(300)):
        assert kernels_used(lambda q=q: init_kernels("torch").attention(q, q, q)) == {FLASH}


def test_a_named_kernel_is_never_replaced_by_a_measured_one():
    store("torch:math")
    q = heads()
    assert kernels_used(lambda: init_kernels("torch", attention="flash").attention(q, q, q)) == {FLASH}
    assert kernels_used(lambda: init_kernels("torch:flash").attention(q, q, q)) == {FLASH}


def test_a_kernel_that_the_process_may_not_use_is_not_preferred():
    store("torch:flash")
    q = heads()
    with sdpa.only("math"):
        assert kernels_used(lambda: init_kernels("torch").attention(q, q, q)) == {MATH}
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize("kernels", ("torch", "torch:flash", "torch:math"))
@pytest.mark.parametrize("additive", (False, True), ids=("bool", "additive"))
def test_a_token_that_sees_nothing_gets_zeros_and_disturbs_no_gradient(kernels, additive):
    q, k, v = (draw(2, 2, tokens, 8, n)[..., 0].requires_grad_() for n, tokens in ((1, 5), (2, 7), (3, 7)))
    mask = draw(2, 1, 5, 7) > -0.3
    mask[:, :, 2] = False
    given = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if additive else mask
    result = operators.attention(q, k, v, mask=given, kernels=kernels)
    assert not result[:, :, 2].any()
    weights = draw(*result.shape, 4)[..., 0]
    scores = (q.double() @ k.double().mT * 8**-0.5).masked_fill(~mask, -1e30)
    expected = (scores.softmax(-1) * mask) @ v.double()
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)
    actual = torch.autograd.grad((result * weights).sum(), (q, k, v))
    for one, want in zip(actual, torch.autograd.grad((expected * weights).sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(one, want, rtol=1e-4, atol=1e-5)


def test_tuning_measures_each_kernel_of_the_device_forward_and_backward():
    probe = Probe("attention", ((1, 4, 9, 16), (1, 2, 9, 16), (1, 2, 9, 16)), causal=True)
    norm = Probe("rmsnorm", ((4, 16), (16,)))
    variants = [registry.create(name) for name in torch_variants(CPU)]
    results = comparison.measure([(probe, torch.float32), (norm, torch.float32)], variants, CPU, rounds=6)
    assert [(one.kernels, one.situation.operation, one.situation.gradient, one.right) for one in results] == [
        (name, "attention", gradient, True) for name in ("torch:flash", "torch:math") for gradient in (False, True)
    ]
    assert results == tuner.read_measurements()


def test_the_order_of_all_kernels_is_that_of_their_mean_speed():
    assert measured_order(CPU) == ()
    store("torch:math", 4.0)
    store("torch:flash", 1.5)
    assert measured_order(CPU) == ("math", "flash")
    store("torch:math", 0.2, gradient=True)  # 0.9 on average
    assert measured_order(CPU) == ("flash", "math")


def test_for_training_the_forward_and_its_gradient_are_measured_together():
    probe = Probe("attention", ((1, 4, 9, 16), (1, 4, 9, 16), (1, 4, 9, 16)), causal=True)
    arguments = probe.arguments(torch.float32, CPU)
    for name, used in (("torch:math", {MATH}), ("torch:flash", {FLASH, FLASH_BACKWARD})):
        plain, variant = comparison._backward(registry.create(name), probe, arguments)
        assert kernels_used(plain) == {FLASH, FLASH_BACKWARD} and kernels_used(variant) == used

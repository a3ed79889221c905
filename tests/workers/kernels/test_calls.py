"""What all kernels have in common: which arrays they take, where results go, and what a wrong call is told."""

import numpy as np
import pytest
import torch
from kernel_cases import angles, draw

from cluster.errors import UserError
from workers.errors import KernelsFailed
from workers.kernels import create
from workers.kernels.implementations.numpy import Kernels


@pytest.fixture(scope="module")
def k():
    return create("numpy")


class TestWhatIsTaken:
    def test_numpy_arrays_are_answered_with_numpy_arrays(self, k):
        x = np.ones((3, 8), np.float32)
        y = k.softmax(x)
        assert isinstance(y, np.ndarray) and y.dtype == np.float32 and y.shape == (3, 8)
        np.testing.assert_allclose(y, 1 / 8)

    def test_bfloat16_of_ml_dtypes_stays_that(self, k):
        ml_dtypes = pytest.importorskip("ml_dtypes")
        x = np.arange(8, dtype=np.float32).astype(ml_dtypes.bfloat16)
        y = k.silu(x)
        assert y.dtype == x.dtype
        want = torch.nn.functional.silu(torch.arange(8).bfloat16())
        assert np.array_equal(y.astype(np.float32), want.float().numpy())

    @pytest.mark.parametrize("view", [lambda a: a[::-1], lambda a: a[:, ::-1], lambda a: a.T, lambda a: a[::2, 1:]])
    def test_views_of_numpy_are_read_where_they_are(self, k, view):
        x = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
        want = torch.from_numpy(view(x).copy()).softmax(-1).numpy()
        np.testing.assert_allclose(k.softmax(view(x)), want, rtol=1e-5)

    def test_read_only_and_byte_swapped_arrays_are_read(self, k):
        x = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
        want = k.softmax(x)
        locked = x.copy()
        locked.flags.writeable = False
        assert np.array_equal(k.softmax(locked), want)
        assert np.array_equal(k.softmax(x.astype(">f4")), want)

    def test_arrays_with_dlpack_come_back_through_their_library(self, k):
        class Other:
            """An array of a library that has nothing but the standard's functions."""

            def __init__(self, tensor):
                self.tensor = tensor

            def __dlpack__(self, **given):
                return self.tensor.__dlpack__(**given)

            def __dlpack_device__(self):
                return self.tensor.__dlpack_device__()

            def __array_namespace__(self):
                return Other

            @staticmethod
            def from_dlpack(tensor):
                return Other(torch.from_dlpack(tensor))

        y = k.softmax(Other(draw(3, 8)))
        assert isinstance(y, Other)
        torch.testing.assert_close(y.tensor, draw(3, 8).softmax(-1))

    def test_a_parameter_is_taken_where_nobody_asks_for_gradients(self, k):
        weight = torch.nn.Parameter(draw(8))
        with torch.no_grad():
            assert not k.rmsnorm(draw(3, 8), weight).requires_grad
        with pytest.raises(UserError, match="weight needs gradients, which this method does not support"):
            k.rmsnorm(draw(3, 8), weight)


class TestWhereResultsGo:
    @pytest.mark.parametrize("make", [torch.empty, lambda *s: torch.empty(s[::-1]).t()], ids=("plain", "transposed"))
    def test_out_is_filled_and_answered(self, k, make):
        x, out = draw(3, 8), make(3, 8)
        assert k.softmax(x, out=out) is out
        torch.testing.assert_close(out, x.softmax(-1))

    def test_out_of_numpy_is_filled_and_answered(self, k):
        x, out = np.ones((3, 8), np.float32), np.empty((3, 16), np.float32)[:, ::2]
        assert k.softmax(x, out=out) is out
        np.testing.assert_allclose(out, 1 / 8)

    @pytest.mark.parametrize("shape", [(3, 8), (2, 20001)], ids=("narrow", "wide"))
    def test_row_operations_work_in_place(self, kernels, shape):
        k, here = kernels, kernels.device
        x, w = draw(*shape).to(here), draw(shape[1]).to(here)
        cos, sin = (table.to(here) for table in angles(3, 2))
        turned = (
            lambda x, **o: k.apply_rope(x, cos, sin, **o),
            lambda x, **o: k.apply_rope(x, cos, sin, layout="pairs", **o),
        )
        for call in (
            lambda x, **o: k.rmsnorm(x, w, **o),
            lambda x, **o: k.layernorm(x, w, w, **o),
            k.softmax,
            k.silu,
            lambda x, **o: k.swiglu(x, x + 1, **o),
            lambda x, **o: k.swiglu(x + 1, x, **o),
            *(turned if shape[1] == 8 else ()),
        ):
            want = call(x)
            for array in (x.clone(), torch.stack((x, x), -1)[..., 0]):
                assert call(array, out=array) is array
                assert torch.equal(array, want)

    def test_nothing_is_written_to_inputs(self, kernels):
        arguments = [draw(2, 3, 8), draw(8), draw(8, 1)[:, 0]]
        before = [one.clone() for one in arguments]
        here = [one.to(kernels.device) for one in arguments]
        kernels.layernorm(*here)
        kernels.softmax(here[0])
        kernels.attention(here[0], here[0], here[0], causal=True)
        for have, want in zip(here, before, strict=True):
            assert torch.equal(have.cpu(), want)

    @pytest.mark.parametrize(
        ("out", "told"),
        [
            (lambda x: torch.empty(3, 9), r"out has shape \[3, 9\] in float32; pass \[3, 8\] in float32"),
            (lambda x: torch.empty(3, 8).half(), r"out has shape \[3, 8\] in float16"),
            (lambda x: torch.empty(3, 1).expand(3, 8), "several elements of out share memory"),
            (lambda x: torch.empty(1).expand(3, 8), "several elements of out share memory"),
            (lambda x: x.flatten()[4:].new_empty(0).set_(x.untyped_storage(), 4, (3, 8)), "out overlaps x in memory"),
            (lambda x: [0.0], "out is a list"),
            (lambda x: np.broadcast_to(np.zeros(8, np.float32), (3, 8)), "out cannot be written"),
            (lambda x: torch.empty(3, 8, device="meta"), "out is on meta"),
        ],
    )
    def test_a_wrong_out_is_refused_before_anything_is_written(self, k, out, told):
        whole = draw(32)
        x, before = whole[:24].view(3, 8), whole.clone()
        with pytest.raises(UserError, match=told):
            k.softmax(x, out=out(x))
        assert torch.equal(whole, before)

    def test_out_may_not_be_another_input(self, k):
        x, w = draw(8, 8), draw(8)
        for call in (lambda: k.rmsnorm(x[0], w, out=w), lambda: k.matmul(x, x.t(), out=x)):
            with pytest.raises(UserError, match="out overlaps"):
                call()


WRONG = {
    "a list": (lambda k: k.softmax([1.0]), "x is a list; pass a torch tensor, a NumPy array"),
    "a number": (lambda k: k.softmax(torch.tensor(1.0)), "x has 0 dimensions; pass at least 1"),
    "integers": (lambda k: k.softmax(torch.ones(3, dtype=torch.int32)), "x is in int32; kernels 'numpy' compute in"),
    "complex numbers": (lambda k: k.silu(np.ones(3, np.complex64)), "x is in complex64"),
    "text": (lambda k: k.silu(np.array(["a"])), "x is an array that torch cannot convert"),
    "sparse": (lambda k: k.silu(torch.ones(3, 3).to_sparse()), "x is a tensor of layout torch.sparse_coo"),
    "two dtypes": (lambda k: k.matmul(draw(2, 3), draw(3, 2).half()), "b is in float16, a in float32; convert it"),
    "another device": (lambda k: k.silu(torch.empty(3, device="meta")), "x is on meta, the kernels 'numpy' compute on"),
    "a weight of another length": (lambda k: k.rmsnorm(draw(3, 8), draw(7)), r"weight has shape \[7\]; pass \[8\]"),
    "a matrix for a weight": (lambda k: k.rmsnorm(draw(3, 8), draw(1, 8)), r"weight has shape \[1, 8\]"),
    "eps below 0": (lambda k: k.rmsnorm(draw(3, 8), eps=-1e-6), "eps is -1e-06; write a finite number of at least 0"),
    "eps that is none": (lambda k: k.layernorm(draw(3, 8), eps="x"), "eps is 'x'"),
    "offset NaN": (lambda k: k.rmsnorm(draw(3, 8), offset=float("nan")), "offset is nan"),
    "two shapes": (lambda k: k.swiglu(draw(3, 8), draw(8)), r"gate has shape \[3, 8\], up \[8\]"),
    "inner dimensions": (lambda k: k.matmul(draw(2, 3), draw(2, 3)), "dimension -1 of a and -2 of b must be equal"),
    "outer dimensions": (lambda k: k.matmul(draw(2, 4, 3), draw(3, 3, 4)), "leading dimensions must be equal, or 1"),
    "a vector": (lambda k: k.matmul(draw(3), draw(3, 2)), "a has 1 dimensions; pass at least 2"),
    "heads": (
        lambda k: k.attention(draw(1, 3, 2, 8), draw(1, 2, 2, 8), draw(1, 2, 2, 8)),
        "3 query heads, 2 key heads",
    ),
    "widths": (lambda k: k.attention(draw(1, 2, 2, 8), draw(1, 2, 2, 4), draw(1, 2, 2, 4)), "equal widths"),
    "values": (lambda k: k.attention(draw(1, 2, 2, 8), draw(1, 2, 3, 8), draw(1, 2, 2, 8)), r"k has shape .*, v \["),
    "a mask": (
        lambda k: k.attention(*[draw(1, 2, 3, 8)] * 3, mask=torch.ones(2, 3).bool()),
        r"mask has shape \[2, 3\]; pass one that broadcasts to \[1, 2, 3, 3\]",
    ),
    "a mask of integers": (
        lambda k: k.attention(*[draw(1, 2, 3, 8)] * 3, mask=torch.ones(3, 3).int()),
        "mask is in int32, q in float32; convert it to float32 or bool",
    ),
    "scale": (lambda k: k.attention(*[draw(1, 2, 3, 8)] * 3, scale=float("inf")), "scale is inf"),
    "tables": (lambda k: k.apply_rope(draw(3, 8), *angles(2, 4)), "3 tokens from position 0 need 3"),
    "wide tables": (lambda k: k.apply_rope(draw(3, 8), *angles(3, 5)), "pass 1 to 4 columns"),
    "a position": (lambda k: k.apply_rope(draw(3, 8), *angles(9, 4), position=-1), "position is -1"),
    "a layout": (lambda k: k.apply_rope(draw(3, 8), *angles(3, 4), layout="halfs"), "did you mean 'halves'"),
    "a gradient": (lambda k: k.silu_backward(draw(3, 7), draw(3, 8)), r"grad has shape \[3, 7\]; pass \[3, 8\]"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_call_is_told_what_is_wrong_and_the_next_is_right(k, what):
    call, told = WRONG[what]
    with pytest.raises(UserError, match=told):
        call(k)
    torch.testing.assert_close(k.softmax(draw(3, 8)), draw(3, 8).softmax(-1))


def test_an_error_inside_an_implementation_is_ours_with_its_words():
    class Broken(Kernels):
        def _softmax(self, x_RC, out_RC):
            raise RuntimeError("the driver has gone")

    with pytest.raises(
        KernelsFailed, match="kernels 'numpy' failed: RuntimeError: the driver has gone; call it on fewer"
    ):
        Broken().softmax(draw(3, 8))


def test_an_array_of_other_kernels_is_refused(k):
    from workers.kernels.arrays import Resident

    lying = Resident(create("numpy"), torch.Size((3, 8)), torch.float32, object())
    with pytest.raises(UserError, match="x is on the device of other kernels; move it here with to_device"):
        k.softmax(lying)


def test_a_device_that_kernels_do_not_have_is_refused():
    with pytest.raises(UserError, match="kernels 'numpy' do not compute on meta"):
        create("numpy", "meta")
    with pytest.raises(UserError, match="'nowhere' is not a device"):
        create("torch", "nowhere")

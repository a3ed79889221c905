"""Kernels in models: recognised by trying, swapped one by one, and taken out again with the same bits."""

import copy
import io
import pickle

import pytest
import torch
from kernel_cases import draw
from torch import nn
from torch.nn import functional as F

from cluster.errors import UserError
from workers import kernels as registry
from workers.benchmark.cases.networks import GPT2, Sizes
from workers.devices.backends import create
from workers.kernels.dispatch import tuner
from workers.kernels.dispatch.fastest import candidates, kind_of
from workers.kernels.dispatch.tuner import KernelMeasurement, software_of
from workers.kernels.models import attention_patch, kernel_insertion, module_forms, module_swap
from workers.kernels.models.call_recorder import RecordedCall
from workers.kernels.models.module_forms import NotReplaceable, form_of
from workers.measurement.inputs import Sample
from workers.models.optimizers import custom_kernels, passes

CPU = torch.device("cpu")
ALL = (torch.float32, torch.bfloat16, torch.float16)
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(autouse=True)
def nothing_is_measured(home):
    """No test here sees what another one measured."""


class Rounds(nn.Module):
    """As Llama's in transformers: rounded before the weight."""

    def __init__(self, width, eps=1e-6, add=0.0, shown=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width) - add)
        self.variance_epsilon, self.add, self.shown = eps, add, shown

    def forward(self, x):
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight + self.add) * normed.to(x.dtype)


class Gemma(Rounds):
    def forward(self, x):
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (normed * (1.0 + self.weight.float())).to(x.dtype)


class Gated(nn.Module):
    def __init__(self, width, hidden, act=F.silu, drop=0.0):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.gate, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width)
        self.act, self.drop = act, nn.Dropout(drop)

    def forward(self, x):
        return self.drop(self.down(self.act(self.gate(x)) * self.up(x)))


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.before, self.gated, self.after = Rounds(width), Gated(width, 96), nn.LayerNorm(width)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(self.after(x + self.gated(self.before(x))))


class TestForms:
    @pytest.mark.parametrize(
        ("module", "operation", "names", "options"),
        [
            (nn.RMSNorm(32, eps=1e-5), "rmsnorm", ("weight", ""), {"eps": 1e-5, "offset": 0.0}),
            (nn.RMSNorm(32), "rmsnorm", ("weight", ""), {"eps": torch.finfo(torch.float32).eps, "offset": 0.0}),
            (Rounds(32, 1e-5), "rmsnorm", ("weight", ""), {"eps": 1e-5, "offset": 0.0, "round_before_weight": True}),
            (Gemma(32), "rmsnorm", ("weight", ""), {"eps": 1e-6, "offset": 1.0}),
            (nn.LayerNorm(32), "layernorm", ("weight", "bias"), {"eps": 1e-5}),
            (nn.LayerNorm(32, eps=1e-3, bias=False), "layernorm", ("weight", ""), {"eps": 1e-3}),
            (nn.LayerNorm(32, elementwise_affine=False), "layernorm", ("", ""), {"eps": 1e-5}),
            (nn.SiLU(), "silu", (), {}),
            (Gated(32, 48), "swiglu", ("gate", "up", "down"), {}),
            (Gated(32, 32), "swiglu", ("gate", "up", "down"), {}),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
    )
    def test_a_module_is_what_it_computes(self, module, operation, names, options):
        found = form_of(module)
        assert (found.operation, found.names, found.options, found.dtypes) == (operation, names, options, ALL)

    @pytest.mark.parametrize(
        "module",
        [nn.Linear(4, 4), nn.GELU(), nn.Identity(), nn.Softmax(-1), nn.BatchNorm1d(4), nn.Embedding(3, 4), Block(),
         nn.Dropout(0.5), nn.MSELoss()],
        ids=lambda module: type(module).__name__,
    )  # fmt: skip
    def test_what_looks_like_nothing_is_passed_over(self, module):
        assert form_of(module) is None

    @pytest.mark.parametrize(
        ("module", "told"),
        [
            (nn.PReLU(4), "it cannot be called with rows alone"),
            (Gated(32, 48, F.gelu), "it is not a gated layer with SiLU"),
            (Gated(32, 48, drop=0.1), "it drops values at random"),
            (nn.utils.parametrizations.weight_norm(Gated(32, 48).gate), None),
            (Rounds(32, add=0.5), "it does not compute a norm that kernels implement"),
        ],
        ids=("prelu", "gelu", "dropout", "linear", "half"),
    )
    def test_what_only_looks_like_one_is_left_with_its_reason(self, module, told):
        if told is None:
            assert form_of(module) is None
        else:
            with pytest.raises(NotReplaceable, match=told):
                form_of(module)

    def test_hooked_replaced_and_parametrised_modules_are_left(self):
        hooked = nn.LayerNorm(8)
        hooked.register_forward_hook(lambda *given: None)
        inner = Gated(8, 16)
        inner.up.register_forward_pre_hook(lambda *given: None)
        replaced = nn.LayerNorm(8)
        replaced.forward = lambda x: x
        normed = nn.LayerNorm(8)
        nn.utils.parametrize.register_parametrization(normed, "weight", nn.Identity())
        later = nn.LayerNorm(8, device="meta")
        short = Gated(8, 16)
        short.gate.weight = nn.Parameter(short.gate.weight.to(torch.float8_e4m3fn), requires_grad=False)
        for module, told in (
            (hooked, "it has hooks"),
            (inner, "it has hooks"),
            (replaced, "its forward was replaced"),
            (later, "its parameters are not loaded yet"),
        ):
            with pytest.raises(NotReplaceable, match=told):
                form_of(module)
        with pytest.raises(NotReplaceable):
            form_of(short)
        assert form_of(normed) is None  # its weight is not its own any more

    def test_trying_changes_neither_the_module_nor_the_random_numbers(self):
        torch.manual_seed(3)
        module = Gated(8, 16).train()
        before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
        form_of(module)
        form_of(nn.LayerNorm(8))
        assert torch.equal(torch.get_rng_state(), state) and module.training
        for name, value in module.state_dict().items():
            assert torch.equal(value, before[name])


def swap_all(model, kernels="numpy"):
    sites, _ = kernel_insertion.find(model)
    for site in sites:
        kernel_insertion.insert(site, {form.operation: kernels for form in site.forms}, CPU)
    return [(site.name, *(form.operation for form in site.forms)) for site in sites]


class TestSwapping:
    def test_names_ties_and_other_models_stay_as_they_were(self):
        model, other = Block(), Block()
        model.before.weight = model.after.weight  # tied
        names, types = [*model.state_dict()], {name: type(m) for name, m in other.named_modules()}
        ids = [id(p) for p in model.parameters()]
        assert [name for name, *_ in swap_all(model)] == ["before", "gated", "after", "act"]
        assert [*model.state_dict()] == names and [id(p) for p in model.parameters()] == ids
        assert isinstance(model.after, nn.LayerNorm) and isinstance(model.before, Rounds)
        assert {name: type(m) for name, m in other.named_modules()} == types
        assert "kernels='numpy'" in repr(model.after)

    @pytest.mark.parametrize("dtype", ALL, ids=str)
    def test_it_answers_as_before_and_to_the_bit_when_taken_out(self, dtype):
        model, x = Block().to(dtype), draw(2, 5, 64).to(dtype)
        want = model(x)
        assert len(swap_all(model)) == 4
        torch.testing.assert_close(model(x), want, rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=2e-2)
        assert kernel_insertion.restore(model) == 4 and kernel_insertion.restore(model) == 0
        assert torch.equal(model(x), want)
        assert {type(m) for m in model.modules()} == {type(m) for m in Block().modules()}

    def test_gradients_are_those_of_the_modules(self):
        model, x = Block(), draw(2, 5, 64).requires_grad_()
        grads = []
        for _ in range(2):
            loss = model(x).square().sum()
            grads.append(torch.autograd.grad(loss, [x, *model.parameters()]))
            swap_all(model)
        for have, want in zip(*grads, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)

    def test_copies_and_pickles_have_kernels_too(self):
        model, x = Block(), draw(2, 5, 64)
        swap_all(model)
        want = model(x)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
            assert torch.equal(one(x), want)
            assert kernel_insertion.restore(one) == 4 and type(one.after) is nn.LayerNorm
        assert module_swap.has_kernels(model.after)

    def test_what_was_not_tried_is_computed_by_the_module(self):
        model = Block()
        swap_all(model)
        x = draw(2, 5, 64)
        mixed = model.before(x.bfloat16())
        assert mixed.dtype == torch.float32  # as this class has it
        assert torch.equal(mixed, copy_without(model).before(x.bfloat16()))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(model.before(x), copy_without(model).before(x))
        assert model.act(input=x).shape == x.shape

    def test_a_compiled_model_has_no_graph_break(self):
        model, x = Block(), draw(2, 5, 64)
        want = model(x)
        swap_all(model)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), want, rtol=1e-4, atol=1e-5)

    def test_state_is_loaded_and_data_parallel_wraps_it(self):
        model, x = Block(), draw(2, 5, 64)
        swap_all(model)
        other = Block()
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(model(x), other(x), rtol=1e-4, atol=1e-5)


def copy_without(model):
    mine = copy.deepcopy(model)
    kernel_insertion.restore(mine)
    return mine


class TestTransformers:
    @pytest.fixture(scope="class")
    def llama(self):
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=100, pad_token_id=0,
        )  # fmt: skip
        return LlamaForCausalLM(config).eval()

    def test_norms_gates_rope_and_attention_are_found(self, llama):
        sites, left = kernel_insertion.find(llama)
        found = [tuple(form.operation for form in site.forms) for site in sites]
        assert found.count(("rmsnorm",)) == 5 and found.count(("swiglu",)) == 2
        assert found.count(("apply_rope", "attention")) == 2 and len(found) == 9 and not left

    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    def test_logits_generation_and_padding_are_as_before(self, llama, implementation):
        model = copy.deepcopy(llama)
        model.set_attn_implementation(implementation)
        plain = copy.deepcopy(model)
        ids = torch.randint(1, 100, (2, 7), generator=torch.Generator().manual_seed(1))
        mask = torch.ones(2, 7, dtype=torch.long)
        mask[0, :3] = 0
        assert len(swap_all(model)) == 9
        with torch.no_grad():
            for given in ({}, {"attention_mask": mask}, {"attention_mask": mask, "use_cache": False}):
                have, want = model(ids, **given).logits, plain(ids, **given).logits
                seen = mask.bool() if given else torch.ones_like(mask).bool()
                torch.testing.assert_close(have[seen], want[seen], rtol=1e-4, atol=1e-5)
            asked = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
            assert torch.equal(model.generate(ids, **asked), plain.generate(ids, **asked))
        assert kernel_insertion.restore(model) == 9
        with torch.no_grad():
            assert torch.equal(model(ids).logits, plain(ids).logits)

    def test_another_model_of_the_class_and_transformers_own_registry_stay(self, llama):
        from transformers.models.llama import modeling_llama

        before = (
            modeling_llama.apply_rotary_pos_emb,
            modeling_llama.ALL_ATTENTION_FUNCTIONS,
            type(llama.model.layers[0].self_attn),
        )
        model = copy.deepcopy(llama)
        swap_all(model)
        model(torch.ones(1, 3, dtype=torch.long))
        after = (
            modeling_llama.apply_rotary_pos_emb,
            modeling_llama.ALL_ATTENTION_FUNCTIONS,
            type(llama.model.layers[0].self_attn),
        )
        assert before == after and not any(map(module_swap.has_kernels, llama.modules()))
        assert llama.config._attn_implementation == model.config._attn_implementation

    def test_training_gives_the_gradients_of_the_modules(self, llama):
        model, plain = copy.deepcopy(llama).train(), copy.deepcopy(llama).train()
        swap_all(model)
        ids = torch.randint(1, 100, (2, 7), generator=torch.Generator().manual_seed(1))
        for one in (model, plain):
            one(ids, labels=ids).loss.backward()
        for (name, have), (_, want) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            torch.testing.assert_close(have.grad, want.grad, rtol=1e-3, atol=1e-5, msg=name)

    def test_a_copy_a_pickle_and_a_compiled_one_answer_alike(self, llama):
        model = copy.deepcopy(llama)
        swap_all(model)
        ids = torch.randint(1, 100, (2, 7), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            want = model(ids).logits
            assert torch.equal(copy.deepcopy(model)(ids).logits, want)
            assert torch.equal(pickle.loads(pickle.dumps(model))(ids).logits, want)
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
            torch.testing.assert_close(compiled(ids).logits, want, rtol=1e-4, atol=1e-5)

    def test_dropout_of_attention_is_left_to_theirs(self, llama):
        model = copy.deepcopy(llama).train()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        plain = copy.deepcopy(model)
        swap_all(model)
        ids = torch.ones(1, 5, dtype=torch.long)
        answers = []
        for one in (model, plain):
            torch.manual_seed(7)
            answers.append(one(ids).logits)
        torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-5)


def said(seen: RecordedCall, kernels="numpy", speedup=2.0, low=1.5, right=True, **about):
    software = software_of(candidates(CPU)[kernels])
    return KernelMeasurement(
        kernel_insertion.situation(seen, kind_of(CPU), **about), kernels, software, speedup, low, 3.0, right
    )


def calls(model, x):
    sites, _ = kernel_insertion.find(model)
    return kernel_insertion.record(model, sites, Sample((x,), {}), CPU)


class TestFitting:
    def test_one_call_of_the_model_tells_what_is_asked_of_its_modules(self):
        model, x = Block(), draw(2, 5, 64)
        want = model(x)
        seen = calls(model, x)
        assert [(one.operation, one.shapes[0]) for one in seen] == [
            ("rmsnorm", (2, 5, 64)), ("swiglu", (2, 5, 96)), ("layernorm", (2, 5, 64)), ("silu", (2, 5, 64))
        ]  # fmt: skip
        assert torch.equal(model(x), want) and not any(map(module_swap.has_kernels, model.modules()))

    def test_only_what_was_measured_to_be_faster_is_swapped_and_the_rest_says_why(self):
        model, x = Block(), draw(2, 5, 64)
        norm, gate, layer, act = calls(model, x)
        lines = [said(norm), said(gate, low=0.9), said(layer, right=False), said(act, "numpy", 9.0)]
        fitted = kernel_insertion.fit(model, Sample((x,), {}), CPU, measured=lines)
        assert {key: one.kernels for key, one in fitted.chosen.items()} == {
            ("before", "rmsnorm"): "numpy", ("act", "silu"): "numpy"
        }  # fmt: skip
        assert fitted.unchanged_modules == {
            "gated (swiglu)": "numpy: no faster: 2.00 times (0.90 to 3.00)",
            "after (layernorm)": "numpy: wrong for 2-63x256",
        }
        assert str(fitted).startswith("rmsnorm in 1 module by numpy, 2.00 times as fast (1.50 to 3.00); silu in 1")

    def test_training_and_the_compiler_want_measurements_of_their_own(self):
        model, x = Block(), draw(2, 5, 64)
        norm, *_ = calls(model, x)
        lines = [said(norm)]
        for given, told in (({"training": True}, "with its gradient"), ({"compiled": True}, "inside torch.compile")):
            fitted = kernel_insertion.fit(model, Sample((x,), {}), CPU, measured=lines, **given)
            assert not fitted.chosen and f"not measured {told}" in fitted.unchanged_modules["before (rmsnorm)"]
        lines += [said(norm, gradient=True)]
        assert kernel_insertion.fit(model, Sample((x,), {}), CPU, measured=lines, training=True).chosen


class TestPass:
    def test_level_o3_takes_stored_measurements_and_says_why_not_else(self):
        model, x = Block().eval(), draw(2, 5, 64)
        backend = create("cpu")
        one = [p for p in passes.PASSES if p.name == "custom_kernels"]
        done = passes.apply(copy.deepcopy(model), one, work(backend, x))
        assert (
            "nothing has been measured on this device: run `polyfleet kernels tune`" in done.skipped["custom_kernels"]
        )
        tuner.store_measurement(said(calls(model, x)[0]))
        done = passes.apply(copy.deepcopy(model), one, work(backend, x))
        assert any(entry.startswith("custom_kernels: rmsnorm in 1 module by numpy") for entry in done.applied)
        assert "custom_kernels" in passes.apply(copy.deepcopy(model), one, work(backend, None)).skipped

    def test_preparing_again_starts_from_the_model_as_it_was(self):
        model, x = Block().eval(), draw(2, 5, 64)
        backend = create("cpu")
        tuner.store_measurement(said(calls(model, x)[0]))
        tuner.store_measurement(said(calls(model, x)[0], compiled=True))
        first = backend.prepare(model, "O3", x)
        assert any(entry.startswith("custom_kernels") for entry in first.applied), first.skipped
        again = backend.prepare(first.model, "O1", x)
        assert not any(map(module_swap.has_kernels, again.model.modules()))

    def test_the_function_measures_and_reports_and_restores(self, absent):
        if reason := registry.unavailable_reason("cpu"):
            absent("compiler", reason)
        model, x = GPT2(Sizes(50, 16, 32, 1, 2)), torch.ones(1, 8, dtype=torch.long)
        backend = create("cpu")
        mine = backend.prepare_model_with_custom_kernels(model.eval(), x)
        assert backend.report.model is mine and mine is not model
        assert tuner.read_measurements() and {one.situation.operation for one in tuner.read_measurements()} >= {
            "layernorm"
        }
        torch.testing.assert_close(mine(x), model(x), rtol=1e-3, atol=1e-3)
        assert torch.equal(custom_kernels.restore_model(mine)(x), model(x))

    def test_a_kernel_that_answers_wrongly_is_taken_out_again(self, monkeypatch):
        model, x = Block().eval(), draw(2, 5, 64)
        tuner.store_measurement(said(calls(model, x)[0]))
        right = module_swap._RMSNorm._compute

        def wrong(self, x, form, kernels):
            return right(self, x, form, kernels) if kernels.startswith("site") else x * 2

        monkeypatch.setattr(module_swap._RMSNorm, "_compute", wrong)
        backend = create("cpu")
        one = [p for p in passes.PASSES if p.name == "custom_kernels"]
        mine = copy.deepcopy(model)
        done = passes.apply(mine, one, work(backend, x))
        assert "rolled back" in done.skipped["custom_kernels"] and torch.equal(mine(x), model(x))

    def test_bad_input_is_told(self):
        backend = create("cpu")
        with pytest.raises(UserError, match="needs a sample input; pass sample_input"):
            backend.prepare_model_with_custom_kernels(Block())
        with pytest.raises(UserError, match=r"a model must be a torch.nn.Module, not str"):
            backend.prepare_model_with_custom_kernels("model", draw(2, 5, 64))


def work(backend, x):
    from workers.measurement.inputs import as_sample
    from workers.models.passes.pass_context import PassContext

    return PassContext(backend, torch.float32, False, as_sample(x))


def test_modules_of_rope_that_turn_otherwise_are_left():
    assert attention_patch._layout_of(lambda q, k, cos, sin: (q, k)) == ""
    assert attention_patch._layout_of(None) == ""
    assert attention_patch._layout_of(lambda q: q) == ""
    assert module_forms.form_of(nn.Identity()) is None

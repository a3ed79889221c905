"""The optimiser keeps what is right and no slower, and says of the rest why not. It runs beside torch-xla too."""

import copy
import os
import time
import weakref
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from cluster.errors import UserError
from workers import OptimizationLevel, get_available_strategies, get_optimizer
from workers.devices import backends
from workers.devices.backends.vendors.cpu import CPUBackend
from workers.measurement import timing
from workers.measurement.inputs import as_sample
from workers.measurement.timing import Timer
from workers.measurement.timing_comparison import compare_timings
from workers.models.optimizers import passes, result
from workers.models.optimizers.optimizer import ModelOptimizer
from workers.models.passes.pass_context import PassContext

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor imports what torch deprecates
NAMES = [name for name in backends.available() if name != "nvidia"]


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    """Its own history; and one thread, whose times a busy machine disturbs least."""
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def perceptron():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.narrow(torch.tanh(self.wide(x)))


class Blocks(nn.Module):
    def __init__(self, width=8, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Normalised(nn.Module):
    """Changes its input in place, as much code for images does."""

    def __init__(self):
        super().__init__()
        self.body, self.largest = perceptron(), Largest()

    def forward(self, x):
        with torch.no_grad():
            x.sub_(0.5).div_(0.25)
        if isinstance(largest := x.abs().max(), torch.Tensor):  # and not what fx follows a model with
            self.largest.append(float(largest))
        return self.body(x)


class Largest(list):
    """Of a model and all its copies."""

    def __deepcopy__(self, memo):
        return self


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_changes_its_input_in_place_gets_the_same_one_in_every_trial(name):
    model, x = Normalised(), torch.rand(4, 16)
    given = x.clone()
    _, result = get_optimizer(name).optimize(model, "conservative", given)
    assert (result.success, result.warnings) == (True, [])
    assert max(model.largest) <= 2 and len(model.largest) > 20
    assert torch.equal(given, x)


@pytest.mark.parametrize("name", NAMES)
def test_every_pass_of_a_level_is_applied_or_skipped_with_a_reason_and_the_model_is_untouched(name):
    model, x = perceptron(), torch.rand(4, 16)
    before = copy.deepcopy(model.state_dict())
    optimised, result = get_optimizer(name).optimize(model, "conservative", x)
    assert (result.success, result.level) == (True, OptimizationLevel.O1)
    applied = {entry.partition(":")[0] for entry in result.optimizations_applied} - {"placement"}
    assert applied | set(result.optimizations_skipped) == {p.name for p in passes.passes_for_level("O1")}
    assert not applied & set(result.optimizations_skipped)
    assert model.training
    assert all(torch.equal(v, before[k]) and v.device.type == "cpu" for k, v in model.state_dict().items())
    with torch.no_grad():
        have = optimised(backends.create(name).to_device(x)).cpu()
    torch.testing.assert_close(have, model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_told_is_measured_on_the_sample(name):
    _, result = get_optimizer(name).optimize(perceptron(), "O1", torch.rand(4, 16))
    told = result.metrics
    for key in ("latency_before_s", "latency_after_s", "speedup"):
        median, low, high = told[key]
        assert 0 < low <= median <= high
    assert told["max_rel_error"] <= told["tolerance"] == 1e-3
    assert told["model_bytes_before"] == 4 * (16 * 32 + 32 + 32 * 8 + 8)
    assert "model" not in result.to_dict()


@pytest.mark.parametrize("name", NAMES)
def test_a_lower_precision_is_tried_only_where_the_tolerance_allows_it(name, needs_native):
    needs_native("bfloat16", name)
    optimizer = get_optimizer(name)
    _, plain = optimizer.optimize(perceptron(), "O1", torch.rand(4, 16))
    assert plain.optimizations_skipped["autocast"] == "the requested precision is float32"
    _, strict = optimizer.optimize(perceptron(), "O1", torch.rand(4, 16), tolerance=1e-5)
    assert "rolled back: the error is" in strict.optimizations_skipped["autocast"]
    _, loose = optimizer.optimize(perceptron(), "O1", torch.rand(4, 16), tolerance=0.1)
    told = loose.metrics["passes"]
    assert "autocast" in told
    if "autocast: bfloat16" in loose.optimizations_applied:
        assert 1e-5 < loose.metrics["max_rel_error"] <= 0.1


def wrong(graph, inputs):
    """A compiler of torch.compile whose programs are off by a tenth."""
    return lambda *given: [1.1 * out for out in graph(*given)]


def slow(graph, inputs):
    """A compiler whose programs wait."""

    def program(*given):
        time.sleep(0.05)
        return graph(*given)

    return program


def failing(graph, inputs):
    """A compiler whose programs fail after their first run."""
    calls = []

    def program(*given):
        calls.append(1)
        if len(calls) > 1:
            raise ValueError("this program is broken")
        return graph(*given)

    return program


def with_compiler(compiler):
    """The CPU with another compiler, as a vendor's back end names one."""
    backend = CPUBackend()
    backend.traits = replace(backend.traits, compiler=compiler)
    return backend


@pytest.mark.parametrize(
    ("compiler", "said"),
    [(wrong, "rolled back: the error is 0.1 "), (slow, "is slower"), (failing, "this program is broken")],
)
def test_a_pass_that_makes_the_model_wrong_slow_or_broken_is_rolled_back_with_its_numbers(compiler, said):
    x = torch.rand(4, 16)
    optimised, result = ModelOptimizer(with_compiler(compiler)).optimize(perceptron(), "O2", x)
    assert said in result.optimizations_skipped["compile"]
    assert result.success
    torch.testing.assert_close(optimised(x), perceptron()(x))


def test_every_model_of_a_process_is_compiled_also_the_twentieth_and_those_made_of_torchs_modules_alone():
    """torch itself stops after eight models that share their outermost code, without an error."""
    programs = []

    def counting(graph, inputs):
        programs.append(graph)
        return graph.forward

    backend = with_compiler(counting)
    for width in range(2, 22):
        x = torch.rand(1, width)
        prepared = backend.prepare(nn.Sequential(nn.Linear(width, width), nn.ReLU()).eval(), "O2", x)
        prepared.model(x)
    assert len(programs) >= 20


def test_inductor_at_the_balanced_level_is_right_whether_kept_or_not():
    x = torch.rand(4, 16)
    optimised, result = get_optimizer("cpu").optimize(perceptron(), "balanced", x)
    assert "compile" in result.metrics["passes"] or result.optimizations_skipped["compile"]
    with torch.no_grad():
        torch.testing.assert_close(optimised(x), perceptron()(x), rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(find_spec("torchao") is not None, reason="torchao is here")
def test_without_torchao_quantising_is_skipped_with_the_remedy():
    work = PassContext(CPUBackend(), torch.float32, False, as_sample(torch.rand(4, 16)))
    assert "the extra 'quantize'" in passes.run(perceptron().eval(), "O3", work).skipped["int8_weights"]


def gradients(model, x):
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def kept_for_backward(model, x):
    """Bytes of activations that autograd holds between forward and backward."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        model(x)
    return sum(kept)


def test_activations_are_recomputed_where_a_step_would_not_fit_with_equal_gradients():
    torch.manual_seed(3)
    model, x = Blocks(), torch.rand(64, 8)
    optimizer = ModelOptimizer(with_compiler(""))
    optimised, result = optimizer.optimize(model, "O2", x, for_training=True, memory_bytes=1 << 10)
    assert "activation_checkpointing: 3 blocks of Block" in result.optimizations_applied
    assert result.optimizations_skipped["fold_conv_bn"].startswith("batch norm learns during training")
    inside = passes.unwrap(optimised)
    assert kept_for_backward(inside, x) < 0.5 * kept_for_backward(model, x)
    for have, want in zip(gradients(inside, x), gradients(model, x), strict=True):
        torch.testing.assert_close(have, want)


def test_activations_are_kept_where_the_step_fits():
    work = PassContext(CPUBackend(), torch.float32, True, as_sample(torch.rand(4, 8)))
    (recompute,) = [p for p in passes.PASSES if p.name == "activation_checkpointing"]
    skipped = passes.apply(Blocks(), [recompute], work).skipped
    assert skipped["activation_checkpointing"].startswith("not needed: a step takes")


def test_without_a_sample_nothing_is_claimed():
    optimised, result = get_optimizer("cpu").optimize(perceptron(), "O1")
    assert not result.success
    assert result.warnings == ["without a sample input nothing was measured or checked"]
    assert result.metrics == {}
    assert isinstance(optimised, nn.Sequential)


class Random(nn.Linear):
    def forward(self, x):
        return super().forward(x) * torch.rand(())


class NotNumbers(nn.Linear):
    def forward(self, x):
        return super().forward(x) * float("nan")


class TwoOutputs(nn.Module):
    """The first output is exact on every device, the second loses all of its digits in a lower precision."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        cancelled = x @ (self.weight * 1e4 + 1.0) - x @ (self.weight * 1e4)
        return {"first": x * 2, "second": cancelled}


class Masked(nn.Linear):
    """As masked logits: an infinity that is meant, among finite values."""

    def forward(self, x):
        return super().forward(x).index_fill(1, torch.tensor([0], device=x.device), float("-inf"))


@pytest.mark.parametrize(
    ("model", "said"), [(Random(16, 4), "its output is random"), (NotNumbers(16, 4), "16 of the 16 values of result 0")]
)
@pytest.mark.parametrize("name", NAMES)
def test_a_result_that_cannot_be_judged_is_no_success_and_says_why(name, model, said):
    _, result = get_optimizer(name).optimize(model, "O1", torch.rand(4, 16))
    assert not result.success
    assert said in result.warnings[0]
    assert set(result.optimizations_skipped.values()) == {"the model's result cannot be checked: see the warnings"}


def test_an_infinity_that_is_meant_is_judged_by_the_finite_values():
    _, result = get_optimizer("cpu").optimize(Masked(16, 4), "O1", torch.rand(4, 16))
    assert result.success
    assert result.warnings == []


def test_every_output_is_compared_not_only_the_first():
    def second_wrong(graph, inputs):
        return lambda *given: [out * (1.1 if n else 1.0) for n, out in enumerate(graph(*given))]

    optimizer = ModelOptimizer(with_compiler(second_wrong))
    _, result = optimizer.optimize(TwoOutputs(), "O2", torch.rand(4, 4), tolerance=1e-2)
    assert "rolled back: the error is" in result.optimizations_skipped["compile"]


def test_a_result_that_a_pass_makes_not_a_number_is_rolled_back():
    def broken(graph, inputs):
        return lambda *given: [out * float("nan") for out in graph(*given)]

    optimised, result = ModelOptimizer(with_compiler(broken)).optimize(perceptron(), "O2", torch.rand(4, 16))
    assert "are NaN" in result.optimizations_skipped["compile"]
    assert optimised(torch.rand(4, 16)).isfinite().all()


def test_only_when_asked_is_the_callers_module_itself_changed():
    model = perceptron()
    optimised, _ = get_optimizer("cpu").optimize(model, "O1", torch.rand(2, 16), inplace=True)
    assert passes.unwrap(optimised) is model
    other, _ = get_optimizer("cpu").optimize(model, "O1", torch.rand(2, 16))
    assert passes.unwrap(other) is not model


def test_an_optimised_model_may_be_prepared_again_and_is_wrapped_once():
    model, x = perceptron().eval(), torch.rand(2, 16)
    optimised, _ = get_optimizer("cpu").optimize(model, "O2", x, tolerance=0.1)
    plain = backends.create("cpu").prepare_model(optimised, "O0", dtype="float32")
    assert list(plain.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(plain(x), model(x))


def test_bad_input_is_one_clear_error_each():
    optimizer, x = get_optimizer("cpu"), torch.rand(2, 16)
    for call, said in (
        (lambda: optimizer.optimize(lambda x: x, "O1", x), r"must be a torch\.nn\.Module, not function"),
        (lambda: optimizer.optimize(perceptron(), "O7", x), "unknown optimisation level 'O7'"),
        (lambda: optimizer.optimize(perceptron(), "agressive", x), "did you mean 'aggressive'"),
        (lambda: optimizer.optimize(perceptron(), "O1", x, tolerance=2), "tolerance is 2"),
        (lambda: optimizer.optimize(perceptron(), "O1", x, tolerance="x"), "tolerance is 'x'"),
        (lambda: optimizer.optimize(perceptron(), "O1", x, memory_bytes=-1), "memory_bytes is -1"),
        (lambda: optimizer.optimize(perceptron(), None, x), "None is not an optimisation level"),
        (lambda: optimizer.optimize(perceptron(), "O1", x, dtype=3), "3 is not a dtype"),
        (lambda: optimizer.optimize(perceptron(), "O1", x, dtype="int8"), "not a precision to compute in"),
        (lambda: optimizer.optimize(perceptron(), "O1", torch.rand(2, 16, device="meta")), "is on meta"),
        (lambda: optimizer.optimize(perceptron(), "O1", torch.rand(2, 17)), "the model fails on its sample input"),
        (lambda: get_optimizer("cudda"), "did you mean 'cuda'"),
    ):
        with pytest.raises(UserError, match=said):
            call()


def test_strategies_tell_what_was_measured_here_and_nothing_else(needs_native):
    needs_native("bfloat16")
    assert {s.measured_speedup for s in get_available_strategies("cpu")} == {None}
    _, result = get_optimizer("cpu").optimize(perceptron(), "O1", torch.rand(4, 16), tolerance=0.1)
    told = {s.name: s for s in get_available_strategies("cpu")}
    assert told["autocast"].measured_speedup == pytest.approx(result.metrics["passes"]["autocast"][0], rel=0.01)
    assert told["compile"].measured_speedup is None
    assert told["compile"].applicable_levels == ("O2", "O3")
    assert told["int8_weights"].requirements[0] == "inference"


def test_a_history_that_was_cut_short_or_cannot_be_written_costs_nothing(tmp_path, monkeypatch):
    result.record_speedup("cpu", "2.13", "compile", 2.0)
    result.history_path().write_text(result.history_path().read_text() + '{"kind": "cpu", "pa')
    result.record_speedup("cpu", "2.13", "compile", 8.0)
    assert result.speedups("cpu")["compile"] in (2.0, 4.0)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path / "file" / "below"))
    result.record_speedup("cpu", "2.13", "compile", 2.0)
    assert result.speedups("cpu") == {}


def test_a_race_is_won_by_the_one_that_does_less(monkeypatch):
    waits_s = []
    monkeypatch.setattr(timing, "perf_counter", lambda: time.perf_counter() + sum(waits_s))
    timer = Timer(backends.create("cpu"))
    long, short = lambda: waits_s.append(400.0), lambda: waits_s.append(10.0)
    raced = compare_timings(long, short, timer, rounds=8)
    assert raced.ratio.low > 1
    assert not raced.slower
    assert compare_timings(short, long, timer, rounds=8).slower


@pytest.mark.parametrize("name", NAMES)
def test_a_race_drops_each_result_before_it_asks_for_the_next(name):
    """One that is held longer makes the next call take fresh memory, and that is then part of its time."""
    backend, made, alive = backends.create(name), [], []

    def call():
        alive.append(sum(one() is not None for one in made))
        result = torch.ones(4, device=backend.device) * 2
        made.append(weakref.ref(result))
        return result

    compare_timings(call, call, Timer(backend), rounds=2)
    assert len(alive) >= 4 and max(alive) == 0  # two calls a round at least: how many more depends on the time of one


@pytest.mark.skipif(os.environ.get("PJRT_DEVICE") != "CPU", reason="torch-xla does not run here")
def test_openxla_compiles_on_a_lazy_device():
    x = torch.rand(4, 16)
    backend = backends.create("xla")
    prepared = backend.prepare(perceptron().eval(), "O2", x)
    assert "compile: openxla" in prepared.applied
    with torch.no_grad():
        torch.testing.assert_close(prepared.model(backend.to_device(x)).cpu(), perceptron()(x), rtol=1e-4, atol=1e-5)

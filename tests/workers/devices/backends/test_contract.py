"""One suite over every back end this process can use; test_second_environment.py runs it in another environment."""

import copy
import json
from importlib import import_module

import pytest
import torch
from torch import nn

from cluster.errors import UserError
from workers.devices import backends
from workers.devices.capability.device_info import DeviceInfo
from workers.errors import OutOfDeviceMemory
from workers.measurement.inputs import Sample
from workers.options.config import PolyfleetConfig

NAMES = [pytest.param(n, marks=[pytest.mark.gpu] if n == "nvidia" else []) for n in backends.available()]


@pytest.fixture(params=NAMES)
def backend(request):
    with backends.create(request.param) as created:
        yield created


class Tied(nn.Module):
    """Embedding and output share one weight; a buffer is known by two names."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("same_scale", self.scale)

    def forward(self, tokens):
        return self.head(self.embedding(tokens) * self.scale)


def convolutional():
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(64, 3),
    )
    for module in model:
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model.eval()


def test_it_says_what_it_is_in_plain_data(backend):
    info = backend.get_device_info()
    assert DeviceInfo.model_validate_json(info.model_dump_json()) == info
    assert json.loads(json.dumps(info.to_dict()))["backend"] == info.backend == backend.BACKEND_NAME
    assert info.device_type == str(backend.device)
    assert info.runtime_versions["torch"] == torch.__version__
    assert info.device_name == backend.device_name
    assert info.kind.split(":")[0] == backend.BACKEND_NAME
    assert info.dtypes_from == "probed"
    assert info.properties["fp8_supported"] == any(name.startswith("float8") for name in info.supported_dtypes)
    assert {"float32", "int64", "bool"} <= set(info.supported_dtypes)
    assert info.total_memory_gb == info.total_memory_mb / 1024 == info.total_memory_bytes / 2**30
    assert info.emulated == backend.emulated
    assert backend.get_all_devices()[0].device_type == info.device_type


def test_a_device_it_does_not_have_is_refused_with_the_number_it_has(backend):
    said = f"has no device 64; this process sees {backend.device_count}"
    for ask in (
        lambda: type(backend)(device_id=64),
        lambda: backend.set_device(64),
        lambda: backend.get_device_info(64),
    ):
        with pytest.raises(UserError, match=said):
            ask()
    assert backend.device_id == 0


def test_the_first_device_can_be_chosen_by_number(backend):
    before = backend.device
    backend.set_device(0)
    assert (backend.device, backend.device_id) == (before, 0)


def test_memory_is_taken_and_given_back_though_a_reference_remains(backend):
    buffer = backend.allocate(1 << 20)
    assert (buffer.numel(), buffer.dtype, buffer.device) == (1 << 20, torch.uint8, backend.device)
    buffer.fill_(7)
    assert int(buffer[-1].cpu()) == 7
    backend.free(buffer)
    assert buffer.numel() == 0


def test_sizes_that_cannot_be_had_are_refused_with_numbers(backend):
    for size in (-1, 2.5, True):
        with pytest.raises(UserError, match="is not a size in bytes"):
            backend.allocate(size)
    with pytest.raises(OutOfDeviceMemory, match=r"GiB free, the task needs 1048576\.0"):
        backend.allocate(1 << 50)
    assert backend.max_memory_bytes() == backend.get_memory_stats()["total_bytes"]
    shared = backend.max_shared_memory_bytes()
    assert shared is None or shared >= 16 << 10


def test_it_is_constructed_with_a_level_and_a_configuration(backend):
    made = type(backend)(PolyfleetConfig(), optimization_level="aggressive")
    assert made.optimization_level == "O3"
    assert type(backend)(optimization_level="o2").optimization_level == "O2"
    assert made.is_available
    assert made.collective_backend
    for wrong in ({"config": "fast"}, {"optimization_level": "O9"}):
        with pytest.raises(UserError, match=r"pass a workers\.PolyfleetConfig|did you mean 'O\d'"):
            type(backend)(**wrong)


def test_the_configured_precision_is_used_where_the_caller_says_nothing(backend, needs_native):
    needs_native("bfloat16", backend.BACKEND_NAME)
    lowered = type(backend)(type(backend.config)(precision="bf16"))
    assert "autocast: bfloat16" in lowered.prepare(convolutional(), "O1", torch.rand(2, 1, 8, 8)).applied
    assert "autocast" in lowered.prepare(convolutional(), "O1", torch.rand(2, 1, 8, 8), "float32").skipped


def test_a_sample_elsewhere_or_a_dtype_without_units_is_refused_and_nothing_is_moved(backend):
    model = nn.Linear(2, 2)
    with pytest.raises(UserError, match="the sample input is on meta"):
        backend.prepare_model(model, "O1", torch.ones(1, 2, device="meta"))
    absent = [d for d in ("float16", "bfloat16") if not backend.supports_dtype(d)]
    for dtype in absent:
        with pytest.raises(UserError, match=f"has no native {dtype}"):
            backend.optimize_for_training(model, None, dtype, inplace=True)
    assert model.weight.device.type == "cpu"
    assert type(model.forward).__name__ == "method"


def test_nested_data_arrives_whole_and_in_its_types(backend):
    data = {"a": torch.arange(3), "b": [torch.ones(2), ("text", None)], "c": Sample((torch.zeros(1),), {"k": 5})}
    moved = backend.to_device(data)
    assert moved["a"].device == moved["b"][0].device == moved["c"].args[0].device == backend.device
    assert moved["a"].tolist() == [0, 1, 2]
    assert moved["b"][1] == ("text", None)
    assert isinstance(moved["c"], Sample)
    assert data["a"].device.type == "cpu"


def test_ties_of_parameters_and_buffers_survive_a_move(backend):
    model = backend.to_device(Tied())
    assert model.head.weight is model.embedding.weight
    assert model.same_scale is model.scale
    assert model.head.weight.device == backend.device
    assert len(list(model.parameters())) == 1


def test_the_same_seed_gives_the_same_numbers(backend):
    draws = []
    for _ in range(2):
        backend.seed(5)
        draws.append((torch.rand(4, device=backend.device).cpu(), torch.rand(4)))
    assert torch.equal(draws[0][0], draws[1][0])
    assert torch.equal(draws[0][1], draws[1][1])


def test_random_state_is_taken_up_where_it_was_left(backend):
    torch.rand(3, device=backend.device)
    state = copy.deepcopy(backend.rng_state())
    first = torch.rand(4, device=backend.device).cpu(), torch.rand(4)
    backend.set_rng_state(state)
    second = torch.rand(4, device=backend.device).cpu(), torch.rand(4)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_random_state_of_another_type_of_device_is_refused(backend):
    state = backend.rng_state() | {"device_type": "abacus"}
    assert not backend.accepts_rng_state(state)
    with pytest.raises(UserError, match="random state of abacus cannot be set"):
        backend.set_rng_state(state)


def test_dtypes_are_tried_out_on_the_device(backend):
    assert {torch.float32, torch.int64, torch.bool} <= backend.supported_dtypes()
    assert backend.supports_dtype("bf16") == backend.supports_dtype(torch.bfloat16)
    with pytest.raises(UserError, match="did you mean 'bfloat16'"):
        backend.supports_dtype("bfloat")


def test_autocast_lowers_a_matrix_product_and_leaves_float32_alone(backend):
    x = torch.ones(4, 4, device=backend.device)
    native = [d for d in (torch.bfloat16, torch.float16) if backend.supports_dtype(d)]
    for asked, got in (("", torch.float32), ("float32", torch.float32), *((d, d) for d in native)):
        with backend.autocast(asked):
            assert (x @ x).dtype == got
    with pytest.raises(UserError, match="not a precision to compute in"):
        backend.autocast("int8")


def test_memory_is_told_in_bytes(backend):
    memory = backend.get_memory_stats()
    assert set(memory) == {"allocated_bytes", "reserved_bytes", "peak_bytes", "free_bytes", "total_bytes"}
    assert 0 < memory["free_bytes"] <= memory["total_bytes"]
    assert all(value is None or isinstance(value, int) for value in memory.values())


def test_synchronize_and_empty_cache_may_be_called_at_any_time(backend):
    y = torch.ones(8, 8, device=backend.device) @ torch.ones(8, 8, device=backend.device)
    backend.step_boundary()
    backend.synchronize()
    backend.empty_cache()
    assert y.cpu().sum() == 8 * 64


@pytest.mark.parametrize("level", ["O0", "o1"])
def test_a_prepared_model_computes_the_same_and_the_callers_model_is_untouched(backend, level):
    model, images = convolutional(), torch.rand(2, 1, 8, 8)
    before, ids = copy.deepcopy(model.state_dict()), [id(p) for p in model.parameters()]
    with torch.no_grad():
        want = copy.deepcopy(model).eval()(images)
    prepared = backend.prepare(model, level, images)
    with torch.no_grad():
        have = prepared.model(backend.to_device(images)).cpu()
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)
    assert not model.training
    assert [id(p) for p in model.parameters()] == ids
    assert all(
        torch.equal(a, b) and b.device.type == "cpu"
        for a, b in zip(before.values(), model.state_dict().values(), strict=True)
    )


def test_every_pass_of_a_level_is_either_applied_or_skipped_with_a_reason(backend):
    prepared = backend.prepare(convolutional(), "O1", torch.rand(2, 1, 8, 8))
    names = {entry.partition(":")[0] for entry in prepared.applied}
    assert names | set(prepared.skipped) == {"placement", "channels_last", "fold_conv_bn", "autocast"}
    assert not names & set(prepared.skipped)
    assert all(prepared.skipped.values())
    assert "fold_conv_bn: 2 pairs" in prepared.applied


def test_a_lower_precision_is_used_only_when_asked_and_answers_in_float32(backend, needs_native):
    needs_native("bfloat16", backend.BACKEND_NAME)
    images = torch.rand(2, 1, 8, 8)
    prepared = backend.prepare(convolutional(), "O1", images, "bf16")
    assert "autocast: bfloat16" in prepared.applied
    with torch.no_grad():
        assert prepared.model(backend.to_device(images)).dtype == torch.float32


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_a_plain_loop_whose_optimizer_was_built_before_the_move_trains(backend, make):
    backend.seed(1)
    model = Tied()
    optimizer = make(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000)
    tokens = torch.arange(11)
    trained = backend.prepare_training(model, optimizer, inplace=True)
    tokens = backend.to_device(tokens)
    losses = []
    for _ in range(12):
        loss = nn.functional.cross_entropy(trained.model(tokens), (tokens + 1) % 11)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert trained.model is model
    assert model.head.weight is model.embedding.weight


def test_without_inplace_copies_are_trained_that_belong_together(backend):
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = copy.deepcopy(model.state_dict())
    trained, its_optimizer = backend.optimize_for_training(model, optimizer)
    trained(backend.to_device(torch.arange(11))).square().mean().backward()
    its_optimizer.step()
    backend.step_boundary()
    assert trained.head.weight is trained.embedding.weight
    assert not torch.equal(trained.head.weight.detach().cpu(), before["head.weight"])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.head.weight.device.type == "cpu"
    assert isinstance(backend.optimize_for_training(model), Tied)
    assert backend.report.applied[0] == "placement"


def test_an_optimizer_that_has_already_stepped_moves_with_its_state(backend):
    def stepped(move_after):
        torch.manual_seed(3)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        where = torch.device("cpu")
        for step in range(4):
            if step == move_after:
                backend.optimize_for_training(model, optimizer, inplace=True)
                where = backend.device
            x = torch.ones(3, 4).to(where)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return model.weight.detach().cpu()

    torch.testing.assert_close(stepped(move_after=2), stepped(move_after=None), rtol=1e-4, atol=1e-6)


def test_training_in_bfloat16_keeps_the_models_type_and_names(backend, needs_native):
    needs_native("bfloat16", backend.BACKEND_NAME)
    model = nn.Linear(4, 2)
    trained = backend.prepare_training(model, None, "bf16", inplace=True)
    assert "autocast: bfloat16" in trained.applied
    assert type(trained.model) is nn.Linear
    assert set(trained.model.state_dict()) == {"weight", "bias"}
    exact = nn.functional.linear(torch.full((1, 4), 0.3, device=backend.device), model.weight, model.bias)
    lowered = trained.model(torch.full((1, 4), 0.3, device=backend.device))
    assert lowered.dtype == torch.float32
    assert not torch.equal(lowered.cpu(), exact.cpu())


def test_training_in_float16_is_refused_for_want_of_loss_scaling(backend, needs_native):
    needs_native("float16", backend.BACKEND_NAME)
    with pytest.raises(UserError, match="needs loss scaling"):
        backend.optimize_for_training(nn.Linear(2, 2), None, "fp16")


def test_what_is_not_a_module_or_a_level_is_refused_before_anything_changes(backend):
    with pytest.raises(UserError, match=r"must be a torch\.nn\.Module, not function"):
        backend.prepare_model(lambda x: x)
    with pytest.raises(UserError, match="unknown optimisation level 'O7'"):
        backend.prepare_model(nn.Linear(2, 2), "O7")


def test_leaving_it_gives_back_what_entering_it_changed(backend):
    hooks = import_module("torch.optim.optimizer")._global_optimizer_post_hooks
    before = len(hooks), torch.get_num_threads()
    with backends.create(backend.BACKEND_NAME):
        if backend.BACKEND_NAME == "cpu":
            torch.set_num_threads(1)
    assert (len(hooks), torch.get_num_threads()) == before

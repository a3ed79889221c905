"""What a model will take, found without allocating it, and what is refused. The benchmark has reality."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cluster.errors import UserError
from workers.models.memory.estimate import estimate_memory

HIDDEN, BATCH, FLOAT = 64, 8, 4
# Three square layers: two kept outputs for backward, and the input the caller holds.
LAYER = (HIDDEN * HIDDEN + HIDDEN) * FLOAT


class Language(nn.Module):
    def __init__(self, vocab=101, hidden=16, tied=True):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=vocab)
        self.tokens = nn.Embedding(vocab, hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids):
        return self.head(self.tokens(ids))


def layers(count=3, device=None):
    return nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN, device=device) for _ in range(count)))


def sample(batch=BATCH):
    return torch.ones(batch, HIDDEN)


def test_inference_holds_the_weights_and_two_neighbouring_activations():
    found = estimate_memory(layers(), sample_input=sample())
    row = BATCH * HIDDEN * FLOAT
    assert found.weights_bytes == 3 * LAYER
    assert found.activations_bytes == 3 * row  # the caller's input, one layer's input and its output
    assert found.total_bytes == 3 * LAYER + 3 * row
    assert (found.gradients_bytes, found.optimizer_state_bytes, found.kv_cache_bytes) == (0, 0, 0)


@pytest.mark.parametrize(
    "optimizer, copies", [("adamw", 2), ("SGD", 0), ("sgd-momentum", 1), ("rmsprop", 1), (None, 0)]
)
def test_training_holds_gradients_and_what_the_optimizer_keeps(optimizer, copies):
    found = estimate_memory(layers(), sample_input=sample(), mode="training", optimizer=optimizer)
    assert found.gradients_bytes == 3 * LAYER
    assert found.optimizer_state_bytes == pytest.approx(copies * 3 * LAYER, abs=100)  # and a step count each
    assert found.total_bytes >= found.weights_bytes + found.gradients_bytes + found.optimizer_state_bytes


def test_an_optimizer_may_be_a_function_of_the_parameters():
    found = estimate_memory(
        layers(), sample_input=sample(), mode="training", optimizer=lambda p: torch.optim.SGD(p, lr=1, momentum=0.5)
    )
    assert found.optimizer_state_bytes == 3 * LAYER


def test_where_activations_rule_the_peak_is_in_backward_and_the_parts_add_up_to_it():
    found = estimate_memory(layers(), sample_input=sample(4096), mode="training")
    assert found.peak == "backward"
    held = found.weights_bytes + found.optimizer_state_bytes + found.activations_bytes + found.workspace_bytes
    assert found.total_bytes == pytest.approx(held, rel=0.35)  # the caller's input comes on top


def test_a_frozen_layer_has_neither_gradient_nor_state():
    model = layers()
    model[0].requires_grad_(False)
    found = estimate_memory(model, sample_input=sample(), mode="training", optimizer="sgd-momentum")
    assert (found.gradients_bytes, found.optimizer_state_bytes) == (2 * LAYER, 2 * LAYER)


def test_a_tied_weight_counts_once():
    tied, apart = (estimate_memory(Language(tied=t), batch=2, seq=4).weights_bytes for t in (True, False))
    assert apart == 2 * tied == 2 * 101 * 16 * FLOAT


def test_dtype_batch_and_seq_say_what_the_sample_stands_for():
    model = Language()
    one = estimate_memory(model, batch=1, seq=8)
    assert estimate_memory(model, batch=1, seq=8, dtype="bf16").weights_bytes == one.weights_bytes // 2
    given = estimate_memory(model, batch=5, seq=8, sample_input=torch.zeros(1, 2, dtype=torch.long))
    assert given == estimate_memory(model, batch=5, seq=8)
    assert given.activations_bytes == 5 * one.activations_bytes


def test_a_model_of_many_terabytes_is_estimated_from_the_meta_device():
    model = nn.Sequential(*(nn.Linear(2**20, 2**20, bias=False, device="meta") for _ in range(2)))
    found = estimate_memory(model, sample_input=torch.empty(1, 2**20, device="meta"), mode="training")
    assert found.weights_bytes == 2 * 2**40 * FLOAT
    assert found.optimizer_state_bytes > 2 * found.weights_bytes


def test_the_callers_model_is_only_read():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    estimate_memory(model, sample_input=torch.ones(2, 3, 8, 8), mode="training")
    assert not model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())


def test_the_loss_decides_what_is_kept():
    def cross_entropy(scores):
        return F.cross_entropy(scores.flatten(0, 1), torch.zeros(scores.shape[0] * scores.shape[1], dtype=torch.long))

    mean, entropy = (
        estimate_memory(Language(), batch=2, seq=4, mode="training", loss=loss) for loss in (None, cross_entropy)
    )
    assert entropy.activations_bytes >= mean.activations_bytes + 2 * 4 * 101 * FLOAT


def test_attention_without_a_fused_kernel_keeps_its_scores():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x):
            return F.scaled_dot_product_attention(*self.qkv(x).unsqueeze(1).chunk(3, -1))

    tokens = torch.ones(1, 256, 16)
    eager, xla = (
        estimate_memory(Attention(), sample_input=tokens, mode="training", execution=e) for e in ("eager", "xla")
    )
    assert xla.activations_bytes >= eager.activations_bytes + 256 * 256 * FLOAT


def test_a_linear_layers_gradient_leaves_an_xla_program_twice():
    eager, xla = (
        estimate_memory(layers(), sample_input=sample(1), mode="training", optimizer=None, execution=e)
        for e in ("eager", "xla")
    )
    assert xla.total_bytes >= eager.total_bytes + 3 * HIDDEN * HIDDEN * FLOAT


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return self.layer(x) if x.sum().item() > 0 else x


@pytest.mark.parametrize(
    "given, message",
    [
        ({"mode": "trainning"}, "did you mean 'training'"),
        ({"optimizer": "adamww", "mode": "training"}, "did you mean 'adamw'"),
        ({"dtype": "bfloat61"}, "did you mean 'bfloat16'"),
        ({"dtype": "int8"}, "floating-point"),
        ({"execution": "eeger"}, "did you mean 'eager'"),
        ({"batch": 0}, "batch is 0"),
        ({"sample_input": None}, "pass sample_input"),
        ({"sample_input": torch.ones(2, 3)}, "the model fails on this sample input"),
        ({"model": nn.Linear}, "memory of a type cannot be estimated"),
        ({"model": 3}, "memory of a int cannot be estimated"),
        ({"model": Reads()}, "cannot be traced without data"),
        ({"model": nn.Flatten(), "mode": "training"}, "no weight of the model requires a gradient"),
        ({"mode": "training", "loss": lambda output: output}, "the loss is not a scalar"),
    ],
)
def test_what_cannot_be_estimated_is_refused_in_one_sentence(given, message):
    asked = {"model": layers(), "sample_input": sample()} | given
    with pytest.raises(UserError, match=message):
        estimate_memory(asked.pop("model"), **asked)


def test_a_sample_on_another_device_than_the_model_is_refused():
    with pytest.raises(UserError, match="the sample input is on cpu, the model on"):
        estimate_memory(_elsewhere(), sample_input=sample())


def _elsewhere():
    """A module on a device that is not the CPU, whatever this machine has: XLA's where there is one."""
    from workers.devices import backends

    names = [name for name in backends.available() if name != "cpu"]
    if not names:
        pytest.skip("this process has no device but the CPU")
    return backends.create(names[0]).to_device(layers())

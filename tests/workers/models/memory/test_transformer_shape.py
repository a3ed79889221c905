"""A transformer from plain numbers: the weights published for it, and what a trace of the same model finds."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cluster.errors import UserError
from workers.models.memory.estimate import estimate_memory
from workers.models.memory.transformer_shape import TransformerShape

ROOT = Path(__file__).parents[4]
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
LLAMA = {
    **{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192},
    **{"tie_word_embeddings": False, "hidden_act": "silu"},
}
BERT = {
    **{"model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
    **{"intermediate_size": 3072, "vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2},
}


def models():
    spec = importlib.util.spec_from_file_location("benchmark_models", ROOT / "benchmarks" / "models.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "config, weights, within",
    [(GPT2, 124_439_808, 0), (LLAMA, 8_030_261_248, 0), (BERT, 109_482_240, 0.006)],  # BERT's pooler is left out
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_a_known_configuration_has_its_published_number_of_weights(config, weights, within):
    assert TransformerShape.from_config(config).weights == pytest.approx(weights, rel=within, abs=0)
    as_object = SimpleNamespace(**config)
    assert estimate_memory(as_object, dtype="bf16").weights_bytes == pytest.approx(2 * weights, rel=within)


def test_the_cache_holds_a_key_and_a_value_of_every_layer_and_token():
    found = estimate_memory(LLAMA, batch=4, seq=8192, dtype="float16")
    assert found.kv_cache_bytes == 2 * 32 * 8 * 128 * 8192 * 4 * 2
    assert found.total_bytes == found.weights_bytes + found.kv_cache_bytes + found.activations_bytes


@pytest.mark.parametrize("batch, seq", [(1, 128), (4, 1024)])
def test_formulas_agree_with_a_trace_of_the_same_model(batch, seq):
    with torch.device("meta"):
        model, sample = models().build("gpt2", batch=batch, seq=seq)

    def loss(scores):
        flat = scores.flatten(0, 1)
        return torch.nn.functional.cross_entropy(flat, torch.zeros(len(flat), dtype=torch.long))

    traced = estimate_memory(model, sample_input=sample, mode="training", loss=loss)
    told = estimate_memory(GPT2, batch, seq, mode="training")
    assert told.activations_bytes == pytest.approx(traced.activations_bytes, rel=0.03)
    assert told.total_bytes == pytest.approx(traced.total_bytes, rel=0.03)
    called = estimate_memory(model, sample_input=sample)
    prefill = estimate_memory(GPT2, batch, seq)
    assert prefill.total_bytes - prefill.kv_cache_bytes == pytest.approx(called.total_bytes, rel=0.03)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"n_embd": 0}, "hidden of a transformer is 0"),
        ({"n_head": 7}, "not a multiple of 7 heads"),
        ({"num_key_value_heads": 5}, "12 heads cannot share 5"),
        ({"n_layer": None}, "lacks layers.*num_hidden_layers"),
    ],
)
def test_numbers_that_make_no_transformer_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        estimate_memory(GPT2 | change)


def test_an_unknown_word_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'adagrad'"):
        estimate_memory(GPT2, mode="training", optimizer="adagard")
    with pytest.raises(UserError, match="did you mean 'bfloat16'"):
        estimate_memory(GPT2, dtype="bfloat61")
    with pytest.raises(UserError, match="pass the module itself"):
        estimate_memory(GPT2, execution="xla")


def test_plain_numbers_need_no_torch():
    code = (
        f"import sys; from workers import estimate_memory; estimate_memory({GPT2!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0

"""Models of transformers by configuration: real ones, made small, measured by a real session."""

import json
from importlib.util import find_spec

import pytest
import torch

from cluster.errors import NotFound, UserError
from workers.benchmark.session import Session
from workers.devices import backends
from workers.tasks import transformers_model

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not in this environment")

SMALL = {
    "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "architectures": ["GPT2LMHeadModel"]},
    "llama": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    "t5": {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2},
    "vit": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
            "image_size": 32},
    "wav2vec2": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
                 "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_feat_extract_layers": 2,
                 "num_conv_pos_embedding_groups": 4, "num_conv_pos_embeddings": 16},
    "whisper": {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
                "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for kind, sizes in SMALL.items():
        vocabulary = {} if kind in ("vit", "wav2vec2", "whisper") else {"vocab_size": 100}
        (tmp_path / f"{kind}.json").write_text(json.dumps({"model_type": kind, **vocabulary, **sizes}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", SMALL)
def test_a_configuration_makes_a_model_and_inputs_that_fit(folder, kind):
    entry = f"transformers:{kind}.json"
    model, sample = transformers_model.make(entry), transformers_model.sample(entry, 2)
    with torch.no_grad():
        model.eval()(*sample.args, **sample.kwargs)
    assert all(len(t) == 2 for t in sample.kwargs.values())
    assert type(model).__name__ == ("GPT2LMHeadModel" if kind == "gpt2" else type(model).__name__)


def test_a_session_measures_one_forward_and_trained_and_checks_both(folder):
    def build():
        torch.manual_seed(0)
        return transformers_model.make("transformers:llama.json"), transformers_model.sample(
            "transformers:llama.json", 2
        )

    with backends.create("cpu") as backend:
        session = Session(backend, 0, build)
        for mode in ("forward", "train"):
            cell = {"case": f"user/transformers:llama.json/{mode}", "precision": "fp32", "level": "O1"}
            told = session.handle({"do": "prepare", "measurement": mode, "case": cell})
            assert told["accuracy"]["ok"], told
            assert told["flops"] > 1e6 and told["items"] == 2
            assert session.handle({"do": "run", "measurement": mode})["parts_s"][0] > 0


def test_an_architecture_alone_has_its_default_sizes():
    assert transformers_model.make("transformers:distilbert").config.dim == 768


@pytest.mark.parametrize(
    ("named", "told", "error", "sentence"),
    [
        ("brt", None, NotFound, "no model type 'brt'; did you mean"),
        ("absent.json", None, NotFound, "no file absent.json in the working folder"),
        ("../x.json", None, NotFound, "no file ../x.json in the working folder"),
        ("bad.json", "[1]", UserError, "bad.json is not a configuration"),
        ("bad.json", "{", UserError, "bad.json is not a configuration"),
        ("bad.json", '{"model_type": "bert", "architectures": ["os"]}', NotFound, "no model class 'os'"),
        ("bad.json", '{"model_type": "bert", "architectures": ["AutoModel"]}', NotFound, "no model class 'AutoModel'"),
    ],
)
def test_what_is_no_model_is_said(folder, named, told, error, sentence):
    (folder.parent / "x.json").write_text("{}")
    if told:
        (folder / named).write_text(told)
    with pytest.raises(error) as caught:
        transformers_model.make(f"transformers:{named}")
    assert sentence in f"{caught.value.message}; {caught.value.remedy}"


def test_code_that_a_configuration_points_to_is_not_run(folder):
    (folder / "evil.py").write_text("raise SystemExit('ran')\nclass Evil: pass")
    (folder / "evil.json").write_text(
        json.dumps({"model_type": "bert", **SMALL["bert"], "auto_map": {"AutoModel": "evil.Evil"}})
    )
    assert type(transformers_model.make("transformers:evil.json")).__name__ == "BertModel"

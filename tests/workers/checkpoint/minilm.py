"""all-MiniLM-L6-v2 in plain torch: embeddings of a few sentences from a checkpoint, on any device.

minilm.py VOCABULARY cpu|xla ROOT…     prints, for each checkpoint in its own dtype, a JSON list per sentence
"""

import json
import re
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import gelu, normalize, scaled_dot_product_attention

from workers.checkpoint import load, open_checkpoint

SENTENCES = (
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "A man is riding a horse.",
    "A man is riding a white horse on an enclosed ground.",
)
WIDTH, HEADS, LAYERS, WORDS, PLACES = 384, 12, 6, 30522, 512


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.self = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("query", "key", "value")})
        self.output = nn.ModuleDict({"dense": nn.Linear(WIDTH, WIDTH), "LayerNorm": nn.LayerNorm(WIDTH, eps=1e-12)})

    def forward(self, x):
        q, k, v = (self.self[n](x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for n in ("query", "key", "value"))
        mixed = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.output["LayerNorm"](x + self.output["dense"](mixed))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(WIDTH, 4 * WIDTH)})
        self.output = nn.ModuleDict({"dense": nn.Linear(4 * WIDTH, WIDTH), "LayerNorm": nn.LayerNorm(WIDTH, eps=1e-12)})

    def forward(self, x):
        x = self.attention(x)
        return self.output["LayerNorm"](x + self.output["dense"](gelu(self.intermediate["dense"](x))))


class MiniLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleDict({
            "word_embeddings": nn.Embedding(WORDS, WIDTH), "position_embeddings": nn.Embedding(PLACES, WIDTH),
            "token_type_embeddings": nn.Embedding(2, WIDTH), "LayerNorm": nn.LayerNorm(WIDTH, eps=1e-12),
        })  # fmt: skip
        self.embeddings.register_buffer("position_ids", torch.arange(PLACES)[None])
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer() for _ in range(LAYERS))})
        self.pooler = nn.ModuleDict({"dense": nn.Linear(WIDTH, WIDTH)})

    def forward(self, tokens):
        e = self.embeddings
        places = e.position_ids[:, : tokens.shape[1]]
        x = e["word_embeddings"](tokens) + e["position_embeddings"](places)
        x = e["LayerNorm"](x + e["token_type_embeddings"](torch.zeros_like(tokens)))
        for layer in self.encoder["layer"]:
            x = layer(x)
        return normalize(x.float().mean(1), dim=-1)  # one sentence at a time: no padding to mask


def tokens_of(sentence, vocabulary):
    """WordPiece, greedily: the longest piece first."""
    found = [vocabulary["[CLS]"]]
    for word in re.findall(r"\w+|[^\w\s]", sentence.lower()):
        start = 0
        while start < len(word):
            pieces = (("##" if start else "") + word[start:end] for end in range(len(word), start, -1))
            piece = next(p for p in pieces if p in vocabulary)
            found.append(vocabulary[piece])
            start += len(piece.removeprefix("##"))
    return torch.tensor([[*found, vocabulary["[SEP]"]]])


def embeddings(root, vocabulary, device, sentences):
    dtype = open_checkpoint(root).tensor("model/pooler.dense.weight").dtype
    model = MiniLM().to(dtype).to(device).eval()
    load(root, {"model": model})
    with torch.no_grad():
        return [model(tokens_of(s, vocabulary).to(device))[0].cpu().tolist() for s in sentences]


def main(words, where, *roots):
    sentences = SENTENCES
    if where == "xla":
        import torch_xla

        where, sentences = torch_xla.device(), SENTENCES[:2]  # each length is a program, and takes seconds to compile
    vocabulary = {word: i for i, word in enumerate(Path(words).read_text().splitlines())}
    print(json.dumps([embeddings(root, vocabulary, where, sentences) for root in roots]))


if __name__ == "__main__":
    main(*sys.argv[1:])

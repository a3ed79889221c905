"""Two small trainings on real data, run by test_moving.py on both sides: a GPT on Python's own documentation, and a
convolutional classifier on handwritten digits, which the CPU side puts beside the checkpoints.

moving_training.py gpt|digits ROOT FROM TO     resume at step FROM from ROOT on the XLA device, train to TO, save there
"""

import json
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

from workers.checkpoint import load, save

CONTEXT = 32


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads = heads

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.mix(self.first(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.think(self.second(x))


class GPT(nn.Module):
    """Bytes in, bytes out; embedding and head are tied."""

    def __init__(self, width=32, layers=1):
        super().__init__()
        self.words, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Digits(nn.Sequential):
    """Batch norm has buffers, and its weights lie channels-last."""

    def __init__(self):
        super().__init__(
            *(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(128, 10)),
        )
        self.to(memory_format=torch.channels_last)


class Text:
    def __init__(self, root):
        text = " ".join(topics[name] for name in sorted(topics)).encode()[:200_000]
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def batch(self, number):
        starts = torch.randint(len(self.data) - CONTEXT - 1, (8,), generator=torch.Generator().manual_seed(number))
        rows = torch.stack([self.data[start : start + CONTEXT + 1] for start in starts.tolist()])
        return rows[:, :-1], rows[:, 1:]


class Images:
    def __init__(self, root):
        held = load_file(Path(root) / "digits.safetensors")
        self.images, self.labels = held["images"], held["labels"]

    def batch(self, number):
        chosen = torch.randint(len(self.labels), (32,), generator=torch.Generator().manual_seed(number))
        return self.images[chosen], self.labels[chosen]


class Training:
    def __init__(self, what, root, seed):
        torch.manual_seed(seed)
        self.data = Text(root) if what == "gpt" else Images(root)
        self.model = GPT() if what == "gpt" else Digits()
        self.what = what
        self.cut = lambda: None  # of the graph: XLA's CPU compiler takes minutes for a whole step as one

    def on(self, device):
        self.model.to(device)
        parameters, xla = self.model.parameters(), torch.device(device).type == "xla"
        if self.what == "gpt":  # on XLA the count of steps lives on the device, so that no step is compiled anew
            self.optimizer, self.scheduler = torch.optim.AdamW(parameters, lr=3e-3, capturable=xla), None
        else:
            self.optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 10)
        self.device = device
        return self

    def state(self):
        state = {"model": self.model, "optimizer": self.optimizer, "rng": True}
        return state | ({"scheduler": self.scheduler} if self.scheduler else {})

    def steps(self, start, end):
        """Losses of the steps; the batch depends on the step alone."""
        losses = []
        for number in range(start, end):
            inputs, wanted = (t.to(self.device) for t in self.data.batch(number))
            loss = cross_entropy(self.model(inputs).flatten(0, -2), wanted.flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.cut()
            self.optimizer.step()
            if self.scheduler:
                self.scheduler.step()
            losses.append(loss.item())
        return losses


if __name__ == "__main__":
    import torch_xla

    what, root, start, end = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    training = Training(what, root, seed=99).on(torch_xla.device())
    loaded = load(root, training.state(), step=start)
    training.cut = torch_xla.sync
    losses = training.steps(start, end)
    save(root, end, training.state(), kind="tpu:emulated")
    print(json.dumps({"losses": losses, "resumed": loaded.step, "retied": loaded.report.retied}))

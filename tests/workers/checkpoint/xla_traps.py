"""Run by test_traps.py where torch_xla is: what goes wrong there with others' ways, and what ours does instead.

xla_traps.py ROOT     prints one JSON object, a key per trap
"""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch_xla
from torch import nn

from workers.checkpoint import convert, load, save
from workers.errors import CheckpointError

DEVICE = torch_xla.device()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens):
        return self.head(self.emb(tokens))


def step(model, optimizer, number):
    torch.manual_seed(number)
    device = next(model.parameters()).device
    tokens = torch.randint(0, 8, (6,)).to(device)
    loss = nn.functional.cross_entropy(model(tokens), tokens)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def said(function, *arguments, **named):
    try:
        function(*arguments, **named)
    except CheckpointError as e:
        return e.message
    return "nothing"


def main(root: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    model = Tied().to(DEVICE)
    found["1 untied by the move"] = model.head.weight is not model.emb.weight
    before = Tied()
    stale = torch.optim.AdamW(before.parameters())
    before = before.to(DEVICE)
    found["2 stale optimizer"] = said(load, root / "cpu", {"model": before, "optimizer": stale})
    fresh = torch.optim.AdamW(model.parameters(), lr=1.0)
    loaded = load(root / "cpu", {"model": model, "optimizer": fresh, "rng": True})
    found["1 tied by the load"] = model.head.weight is model.emb.weight
    found["9 random"] = loaded.report.random["xla"]
    found["19 options"] = [fresh.param_groups[0]["lr"], fresh.state[model.emb.weight]["step"].device.type]
    found["19 losses"] = [step(model, fresh, number) for number in range(3, 6)]
    save(root / "xla", 6, {"model": model, "optimizer": fresh})
    found["3 complex128"] = said(load, root / "complex", device=DEVICE)
    found["18 fnuz"] = said(load, root / "fnuz", device=DEVICE)
    found["15 load to the device"] = load(root / "cpu", device="xla").state["extra"]["t"].device.type

    image = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last).to(DEVICE)
    load(root / "image", {"model": image})
    save(root / "image back", 2, {"model": image})

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save({"w": model.emb.weight.detach()}, root / "from xla.pt")
    found["18 converted"] = convert(next((root / "fnuz").glob("step-*")), root / "converted", to_kind="tpu:v5e")[
        "dtypes"
    ]
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))

"""Nothing is pickled and nothing unpickled, shown in a process where either ends the test."""

import subprocess
import sys

PICKLE_IS_FORBIDDEN = """
import pickle, sys
import numpy as np, torch
from torch import nn
from workers.checkpoint import load, save, verify

class forbidden:  # a class, for torch derives one from it
    def __init__(self, *arguments, **named):
        raise SystemExit("pickle was used")

sys.addaudithook(lambda event, _: forbidden() if event == "pickle.find_class" else None)
for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler", "_Pickler", "_Unpickler"):
    setattr(pickle, name, forbidden)
try:
    torch.save({}, sys.argv[1] + "/x.pt")
except SystemExit:
    print("the trap works")

def build():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
            "extra": {"array": np.arange(3), "scalar": np.float64(0.5), "tuple": (1, b"x")}, "rng": True}

state = build()
state["model"](torch.ones(3, 2)).sum().backward()
state["optimizer"].step()
path = save(sys.argv[1], 1, state).path
load(sys.argv[1], build())
load(sys.argv[1])
print(verify(path)["ok"])
"""


def test_save_and_load_use_no_pickle(tmp_path):
    done = subprocess.run([sys.executable, "-c", PICKLE_IS_FORBIDDEN, tmp_path], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the trap works\nTrue\n", "")

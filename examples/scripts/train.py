"""Trains a small model, saves now and then, goes on from what it saved: a script that knows nothing of Polyfleet."""

import argparse
import signal
import time
from pathlib import Path

import torch


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("ckpt.pt"))
    parser.add_argument("--resume", type=Path, default=None)
    return parser.parse_args()


def main() -> None:
    args, stop = parsed(), []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first = 0
    if args.resume:
        saved = torch.load(args.resume)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
        print(f"goes on from step {first}")
    for step in range(first + 1, args.steps + 1):
        x = torch.rand(64, 1) * 6
        loss = torch.nn.functional.mse_loss(model(x), torch.sin(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if stop or step % args.save_every == 0 or step == args.steps:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, args.out)
            print(f"step {step}: loss {loss.item():.4f}, saved")
        if stop:
            return
        time.sleep(args.pause)


if __name__ == "__main__":
    main()

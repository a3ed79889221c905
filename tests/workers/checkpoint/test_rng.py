import random

import numpy as np
import torch

from workers.checkpoint import load, save
from workers.checkpoint.state.rng import CONTINUED, derived_seed, restore_rng


def draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]


def test_all_streams_go_on_exactly_where_they_were(tmp_path):
    random.gauss(0, 1), np.random.randn()  # each leaves a second value behind
    save(tmp_path, 1, {"rng": True})
    expected = draws()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    report = load(tmp_path, {"rng": True}).report
    assert draws() == expected
    assert report.random == {"python": CONTINUED, "numpy": CONTINUED, "cpu": CONTINUED}


def test_saving_and_a_plain_load_draw_nothing(tmp_path):
    torch.manual_seed(3)
    expected = [draws()[-1] for _ in range(2)]
    torch.manual_seed(3)
    first = draws()[-1]
    save(tmp_path, 1, {"rng": True, "t": torch.zeros(2)})
    plain = load(tmp_path).state["rng"]
    assert [first, draws()[-1]] == expected
    assert plain["seed"] == 3


def test_a_stream_that_cannot_follow_is_derived_and_said(tmp_path):
    save(tmp_path, 1, {"rng": True})
    saved = load(tmp_path).state["rng"]
    saved["torch"] = {"cuda": torch.zeros(16, dtype=torch.uint8)}  # as if it had been saved on another kind of device
    said = restore_rng(saved, 5, {"cpu"})["cpu"]
    first = torch.rand(3)
    assert said == "derived from (seed, rank, step, device type): saved on cuda"
    restore_rng(saved, 5, {"cpu"})
    assert torch.equal(torch.rand(3), first)
    restore_rng(saved, 6, {"cpu"})
    assert not torch.equal(torch.rand(3), first)
    restore_rng(saved, 5, {"cpu"}, rank=1)
    assert not torch.equal(torch.rand(3), first)


def test_a_state_of_another_form_is_derived_and_said(tmp_path):
    save(tmp_path, 1, {"rng": True})
    saved = load(tmp_path).state["rng"]
    saved["torch"]["cpu"] = torch.zeros(7, dtype=torch.uint8)
    assert "another form" in restore_rng(saved, 1, ())["cpu"]


def test_derived_seeds_are_the_same_everywhere_and_fit_every_device():
    assert derived_seed(0, 0, 100, "xla") == 2457748805780944455
    seeds = {derived_seed(s, r, n, d) for s in (0, 1) for r in (0, 1) for n in (0, 1) for d in ("cpu", "xla")}
    assert len(seeds) == 16
    assert derived_seed(2**64 - 1, 7, 10**12, "cuda") < 2**63

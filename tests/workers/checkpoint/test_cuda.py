"""From a GPU and back to it. Nothing of Ray."""

import pytest
import torch
from torch import nn

from workers.checkpoint import load, save

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA or AMD GPU here")]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_model_and_its_optimizer_go_from_the_gpu_to_the_cpu_and_back_bit_for_bit(asynchronous, tmp_path):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last), nn.Flatten(), nn.LazyLinear(5)
    ).cuda()
    model(torch.randn(2, 3, 16, 16, device="cuda"))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(2, 3, 16, 16, device="cuda")).sum().backward()
    optimizer.step()
    saved = save(tmp_path, 1, {"model": model, "optimizer": optimizer, "rng": True}, asynchronous=asynchronous)
    if asynchronous:
        saved.result()
    here = load(tmp_path).state["model"]
    assert all(torch.equal(here[name], tensor.cpu()) for name, tensor in model.state_dict().items())
    drawn = torch.rand(3, device="cuda")
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    report = load(tmp_path, {"model": model, "optimizer": optimizer, "rng": True}).report
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    assert report.random["cuda"] == "continued"
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
    narrow = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(1568, 5)).cuda().bfloat16()
    load(tmp_path, {"model": narrow}, on_lossy="allow")
    assert torch.equal(narrow[0].weight, wanted["0.weight"].bfloat16())

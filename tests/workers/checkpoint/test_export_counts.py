"""An export says how many tensors it wrote: as many as the files hold, counted by those whose formats they are."""

import zipfile
from pathlib import Path

import pytest
import torch
from lazy_modules import LazyModule
from safetensors import safe_open

from workers.checkpoint import export_checkpoint, save

dcp = LazyModule("torch.distributed.checkpoint")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def held_in(path: Path) -> int:
    """Tensors in one file, or in all files of a folder."""
    if (path / ".metadata").is_file():
        described = dcp.FileSystemReader(path).read_metadata().state_dict_metadata.values()
        return sum(isinstance(told, dcp.metadata.TensorStorageMetadata) for told in described)
    if path.is_dir():
        return sum(held_in(file) for file in path.iterdir() if not file.name.endswith(".json"))
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            return len(file.keys())
    with zipfile.ZipFile(path) as archive:
        return sum("/data/" in name for name in archive.namelist())


@pytest.fixture
def state(tied, train):
    """Tied weights, an optimizer, values with tensors, arrays and a tensor that occurs twice; random state."""
    model = tied()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 2)
    twice = torch.ones(3)
    extra = {"one": twice, "two": [twice, torch.zeros(2)], "loss": torch.tensor(0.5).numpy()}
    return {"model": model, "optimizer": optimizer, "extra": extra, "rng": True}


@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp", "accelerate"])
def test_the_count_is_that_of_the_files(kind, state, tmp_path):
    path = save(tmp_path / "own", 1, state).path
    told = export_checkpoint(path, tmp_path / "out", format=kind)
    assert told["tensors"] == held_in(tmp_path / "out")


@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp"])
def test_the_count_is_that_of_the_module_that_was_chosen(kind, state, tmp_path):
    path = save(tmp_path / "own", 1, state | {"other": torch.nn.Linear(2, 2)}).path
    told = export_checkpoint(path, tmp_path / "out", format=kind, entry="other")
    assert told["tensors"] == held_in(tmp_path / "out") == 2


def test_files_that_a_large_module_is_cut_into_count_together(tmp_path, monkeypatch):
    monkeypatch.setattr("workers.checkpoint.exchange.exporter.SHARD_BYTES", 2000)
    model = torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(3)))
    path = save(tmp_path / "own", 1, {"model": model}).path
    told = export_checkpoint(path, tmp_path / "out")
    assert told["tensors"] == held_in(tmp_path / "out") == 6
    assert len(told["files"]) == 4

"""The handwritten digits, and batches that depend only on seed and step: a resumed run goes on with the same ones."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import prepare_data
import torch

TEST_IMAGES = 360


class Digits(NamedTuple):
    """Images are (N, 1, 8, 8) float32 from 0 to 1, labels (N,) int64."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def load() -> Digits:
    """From digits.npz beside this file, else from scikit-learn where it is installed; always split in the same way."""
    file = Path(__file__).with_name("digits.npz")
    if file.is_file():
        with np.load(file, allow_pickle=False) as stored:
            pixels, labels = stored["pixels"], stored["labels"]
    else:
        pixels, labels = prepare_data.read()
    order = np.random.RandomState(0).permutation(len(labels))
    images = torch.from_numpy(pixels[order].astype("float32") / 16).reshape(-1, 1, 8, 8)
    numbers = torch.from_numpy(labels[order].astype("int64"))
    return Digits(images[TEST_IMAGES:], numbers[TEST_IMAGES:], images[:TEST_IMAGES], numbers[:TEST_IMAGES])


def batch(digits: Digits, step: int, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Batch number `step`, from 0, of an endless stream of freshly shuffled epochs."""
    count = len(digits.train_labels)
    epoch, start = divmod(step * size, count)
    stream = np.concatenate([_shuffled(count, seed, epoch + i) for i in range(size // count + 2)])
    picked = torch.from_numpy(stream[start : start + size])
    return digits.train_images[picked], digits.train_labels[picked]


def _shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """NumPy promises that these numbers are the same in every version."""
    return np.random.RandomState([seed, epoch]).permutation(count)

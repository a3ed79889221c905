"""Find the step of an imported source, by the names that training scripts use."""

import math
import re
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from workers.checkpoint.exchange.pickles.strided import StridedSource
from workers.checkpoint.exchange.pickles.tensors import InlineTensor, Reference
from workers.checkpoint.format.dtypes import DTYPES

NAMES = (
    *("global_step", "step", "iter_num", "iteration", "iter", "global_iter", "current_iter"),
    *("num_steps", "steps", "steps_taken", "train_step", "training_step", "current_step", "completed_steps"),
    *("num_updates", "total_steps_taken", "n_iter", "iterations"),
)
"""Lightning and the Trainer; tutorials; nanoGPT; Megatron and detectron2; MMEngine; others in order of frequency."""
EPOCHS = ("epoch", "epochs", "current_epoch", "epochs_trained")
WITHIN = ("trainer_state", "train_state", "training_state", "state", "meta", "extra", "extra_state", "progress", "info")
"""Dicts that may contain such a name: torchtitan, MMEngine, fairseq."""
MAX_STEP = 2**63 - 1
_IN_NAME = re.compile(r"(?:^|[-_.])(?:step|steps|iter|iteration|checkpoint|ckpt)[-_=]?(\d{1,18})(?=$|[-_.])")
_DIGITS = re.compile(r"[0-9]{1,18}")
_CODES = {"int64": "<q", "int32": "<i", "int16": "<h", "int8": "<b", "uint8": "<B", "float32": "<f", "float64": "<d"}


def step_in(value: Any) -> tuple[int, str] | None:
    """Return the step in a file's value, with its key; an epoch if there is no step."""
    dicts = [*_dicts(value)]
    for names in (NAMES, EPOCHS):
        for prefix, values in dicts:
            for name in names:
                if (number := _number(values.get(name))) is not None:
                    return number, f"{prefix}{name}"
    return None


def step_in_texts(metadata: dict[str, str]) -> tuple[int, str] | None:
    """Return the step in the texts of a safetensors header, with its key; kohya-ss begins its keys with `ss_`."""
    numbers = {key: int(text) for key, text in metadata.items() if _DIGITS.fullmatch(text)}
    return step_in(numbers | {key.removeprefix("ss_"): number for key, number in numbers.items()})


def step_in_name(name: str) -> int | None:
    """Return the step in a name such as checkpoint-500, step_500 or ckpt-500.pt."""
    match = _IN_NAME.search(name.lower())
    return int(match[1]) if match else None


def _dicts(value: Any) -> Iterator[tuple[str, dict[Any, Any]]]:
    if isinstance(value, dict):
        yield "", value
        yield from ((f"{name}.", value[name]) for name in WITHIN if isinstance(value.get(name), dict))


def _number(value: Any) -> int | None:
    """Return a non-negative integer, also from a float or from a tensor or array of one element."""
    if isinstance(value, Reference | InlineTensor):
        value = _element(value)
    elif isinstance(value, np.ndarray | np.generic) and value.size == 1:
        value = value.item()
    if type(value) is float and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value <= MAX_STEP else None


def _element(tensor: Reference | InlineTensor) -> Any:
    if math.prod(tensor.shape) != 1 or tensor.dtype not in _CODES:
        return None
    data = bytearray(DTYPES[tensor.dtype].bytes)
    StridedSource(tensor.array if isinstance(tensor, InlineTensor) else tensor).read(0, len(data), memoryview(data))
    return struct.unpack(_CODES[tensor.dtype], data)[0]

"""What is said where torch-xla is absent."""

from importlib.util import find_spec

import pytest
import torch
from torch import nn

from workers import validate


@pytest.mark.skipif(find_spec("torch_xla") is not None, reason="torch-xla is here")
def test_without_torch_xla_the_lowering_is_said_not_to_have_been_tried():
    not_run = validate(nn.Linear(4, 2), "tpu:v5e", torch.rand(2, 4)).checks_not_run
    assert not_run["lowering"] == "torch-xla is not installed in this environment"

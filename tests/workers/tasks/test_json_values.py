import json

import numpy as np
import pytest
import torch

from cluster.errors import UserError
from workers.protocol.json_values import metric, plain


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (1, 1),
        (0.5, 0.5),
        (True, True),
        (None, None),
        ("ok", "ok"),
        (torch.tensor(2.0), 2.0),
        (torch.tensor([3]), 3),
        (np.float32(0.25), 0.25),
        (np.int64(7), 7),
        (float("nan"), "nan"),
        (torch.tensor(float("-inf")), "-inf"),
    ],
)
def test_a_metric_becomes_what_json_takes(value, told):
    assert metric("x", value) == told
    json.dumps(metric("x", value), allow_nan=False)


def test_a_metric_that_is_no_single_number_is_refused_by_name_and_shape():
    with pytest.raises(UserError, match=r"ctx\.report\(loss=\.\.\.\) received a Tensor of shape \(2, 3\)"):
        metric("loss", torch.zeros(2, 3))
    with pytest.raises(UserError, match="received a dict"):
        metric("loss", {})


def test_what_a_function_returns_never_fails_to_be_told():
    returned = {1: torch.tensor(2.0), "list": (np.float64(0.5), [float("inf")]), "odd": torch.zeros(2), "type": int}
    told = plain(returned)
    assert json.loads(json.dumps(told, allow_nan=False)) == {
        "1": 2.0, "list": [0.5, ["inf"]], "odd": "tensor([0., 0.])", "type": "<class 'int'>"
    }  # fmt: skip

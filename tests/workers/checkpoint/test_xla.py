"""From torch on the CPU to torch_xla and IPEX in another environment and back: real interpreters on both sides."""

import pytest
import torch
from second_environment import INTERPRETER, on_xla

from workers.checkpoint import load, save

pytestmark = [
    pytest.mark.xla,
    pytest.mark.skipif(not INTERPRETER, reason="POLYFLEET_XLA_PYTHON names no interpreter that has torch_xla"),
]


HELD = {"float8_e4m3fn": 1, "float8_e5m2": 1, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8}
HELD |= {f"{sign}int{8 * size}": size for sign in ("", "u") for size in (1, 2, 4, 8)}

BITS = """
import json, sys, torch, torch_xla
from workers.checkpoint import load, save
state = load(sys.argv[1], device="xla").state
save(sys.argv[1], 2, {name: state[name] for name in state if name != "rng"})
print(json.dumps(sorted({t.device.type for t in state["t"].values()})))
"""


def test_every_dtype_xla_holds_goes_there_and_back_bit_for_bit(tmp_path, bits):
    state = {
        n: torch.randint(0, 256, (64 * size,), dtype=torch.uint8).view(getattr(torch, n)) for n, size in HELD.items()
    }
    state["float16"] = torch.randn(64).half()  # its NaN lose their payload in torch_xla 2.8's transfer, and stay NaN
    state |= {"bool": torch.tensor([True, False]), "scalar": torch.tensor(1.5), "empty": torch.empty(0, 3)}
    state["turned"] = torch.randn(3, 4).t()
    save(tmp_path, 1, {"t": state, "extra": [(1, "x")]})
    assert on_xla(["-c", BITS, str(tmp_path)]) == ["xla"]
    loaded = load(tmp_path)
    assert loaded.step == 2
    assert bits(loaded.state["t"]) == bits(state)
    assert loaded.state["extra"] == [(1, "x")]


IPEX = """
import json, sys, torch
import intel_extension_for_pytorch as ipex
from workers.checkpoint import load, save
from workers.errors import CheckpointError

said = {}
for name, options in {"plain": {}, "masters": {"dtype": torch.bfloat16, "weights_prepack": False},
                      "packed": {"dtype": torch.bfloat16}}.items():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    try:
        model, optimizer = ipex.optimize(model.train(), optimizer=torch.optim.SGD(model.parameters()), **options)
    except AssertionError as e:  # packing bfloat16 needs AVX-512, or AVX-NE-CONVERT
        said[name] = f"IPEX refuses: {e}"
        continue
    try:
        save(sys.argv[1], 1, {"model": model, "optimizer": optimizer})
        said[name] = "saved"
    except CheckpointError as e:
        said[name] = e.message
print(json.dumps(said))
"""


def test_what_ipex_hides_is_refused_and_what_it_does_not_is_saved(tmp_path):
    said = on_xla(["-c", IPEX, str(tmp_path)])
    packed = said.pop("packed")
    assert said == {
        "plain": "saved",
        "masters": "optimizer keeps master weights outside its state (intel_extension_for_pytorch)",
    }
    hidden = "model/0 is a _IPEXLinear, which hides state of its own"
    assert packed == hidden or packed.startswith("IPEX refuses: BF16 weight prepack needs")
    assert load(tmp_path).state["model"]["0.weight"].dtype == torch.float32

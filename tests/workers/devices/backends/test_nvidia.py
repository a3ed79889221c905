"""On a real NVIDIA device, without Ray and without pydantic; test_contract.py runs its suite there as well."""

import pytest
import torch
from torch import nn

from workers.devices import backends
from workers.measurement.timing import Timer
from workers.options.config import PolyfleetConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip is not None, reason="no NVIDIA device here"),
]


def test_a_measured_product_takes_at_least_the_time_that_the_device_itself_counts():
    """A clock that only sees launches would read a tenth of it."""
    with backends.create("cuda") as backend:
        x = torch.rand(4096, 4096, device=backend.device)

        def ten_products():
            y = x
            for _ in range(10):
                y = (x @ y) / 4096
            return y

        timer = Timer(backend)
        block, alone_s = timer.block(ten_products, 1, parts=7), timer.single_call_s(ten_products)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        ten_products()
        end.record()
        end.synchronize()
    assert timer.name == "cuda events"
    assert min(*block.parts_s, alone_s) >= 0.5 * start.elapsed_time(end) / 1000


def test_memory_taken_is_seen_and_given_back():
    with backends.create("nvidia") as backend:
        before = backend.get_memory_stats()
        block = torch.empty(256 << 20, dtype=torch.uint8, device=backend.device)
        held = backend.get_memory_stats()
        assert held["allocated_bytes"] - before["allocated_bytes"] == 256 << 20
        assert held["peak_bytes"] >= held["allocated_bytes"]
        del block
        backend.empty_cache()
        assert backend.get_memory_stats()["reserved_bytes"] < held["reserved_bytes"]


def test_native_dtypes_follow_the_compute_capability():
    backend = backends.create("nvidia")
    capability = torch.cuda.get_device_capability()
    assert backend.supports_dtype("bfloat16") == (capability >= (8, 0))
    assert backend.supports_dtype("float8_e4m3fn") == (capability >= (8, 9))
    assert not backend.supports_dtype("float8_e4m3fnuz")
    assert backend.get_device_info().compute_capability == "{}.{}".format(*capability)


def test_half_precision_convolutions_go_channels_last_and_float32_ones_do_not():
    backend = backends.create("nvidia")
    model, images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.rand(2, 3, 16, 16)
    assert "channels_last" in backend.prepare(model, "O1", images, "fp16").applied
    assert "tensor cores" in backend.prepare(model, "O1", images).skipped["channels_last"]


def test_the_highest_level_compiles_and_computes_the_same():
    backend = backends.create("nvidia")
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)), torch.rand(16, 64)
    prepared = backend.prepare(model, "O2", x)
    assert "compile: inductor" in prepared.applied, prepared.skipped
    with torch.no_grad():
        torch.testing.assert_close(prepared.model(backend.to_device(x)).cpu(), model(x), rtol=1e-4, atol=1e-4)


def test_the_configured_fraction_of_the_memory_is_the_most_a_process_gets():
    config = PolyfleetConfig(nvidia={"memory_fraction": 0.01})
    backend = backends.create("nvidia", config=config)
    with backend, pytest.raises(torch.OutOfMemoryError):
        torch.empty(backend.max_memory_bytes() * 2, dtype=torch.uint8, device=backend.device)
    assert torch.empty(1 << 20, device=backend.device).numel() == 1 << 20


def test_growing_segments_are_used_when_configured():
    with backends.create("nvidia", config=PolyfleetConfig(nvidia={"memory_growth": True})) as backend:
        backend.empty_cache()
        held = backend.allocate(64 << 20)
        assert any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())
        backend.free(held)


def test_tf32_changes_what_a_product_in_float32_loses():
    x = torch.rand(512, 512, device="cuda")
    exact = (x.double() @ x.double()).float()
    errors = {}
    for allowed in (True, False):
        with backends.create("nvidia", config=PolyfleetConfig(nvidia={"allow_tf32": allowed})):
            errors[allowed] = float((x @ x - exact).abs().max())
    assert errors[True] > 10 * errors[False]

"""Fingerprints of what a model computes, layer by layer, to find where the results of two machines diverge.

The model is not compiled and stays in eval mode, because dropout alone would make two runs differ. Only batch norms are
in training mode: torch-xla 2.8 aborts in the backward of one in eval mode.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from workers.devices.backends.base import BaseBackend
from workers.devices.backends.device_transfer import tensors_of
from workers.devices.backends.precision import name_of
from workers.measurement.fingerprint import inputs_sha256, weights_sha256
from workers.measurement.inputs import Sample
from workers.measurement.output_difference import first_tensor
from workers.protocol.json_values import plain

SKETCH = 256
"""Numbers in a tensor's sketch, the part of a fingerprint that measures distances."""
LEARNING_RATE = 1e-3
Data = dict[str, Any]


def record(model: nn.Module, sample: Sample, backend: BaseBackend, steps: int, autocast: Callable[[], Any]) -> Data:
    """Record every module's activations in order of execution, gradients by name, and losses of `steps` SGD steps.

    Changes `model`.
    """
    hashes = {"weights_sha256": weights_sha256(model), "inputs_sha256": inputs_sha256(sample)}
    moved, inputs = backend.to_device(model).eval(), backend.to_device(sample)
    for module in moved.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train()
    moved.zero_grad()
    layers: list[Data] = []
    with _record_outputs(moved, layers), autocast():
        arguments = inputs.copy()
        output = moved(*arguments.args, **arguments.kwargs)
    loss = _loss(output)
    loss.backward()  # type: ignore[no-untyped-call]
    backend.step_boundary()
    gradients = [fingerprint(name, p.grad) for name, p in moved.named_parameters() if p.grad is not None]
    losses = [float(loss.detach().cpu()), *_steps(moved, inputs, backend, steps, autocast)]
    return plain(hashes | {"layers": layers, "gradients": gradients, "losses": losses})  # type: ignore[no-any-return]


def _steps(
    model: nn.Module, inputs: Sample, backend: BaseBackend, steps: int, autocast: Callable[[], Any]
) -> Iterator[float]:
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad] or [torch.zeros(1)], lr=LEARNING_RATE)
    for _ in range(steps):
        sgd.step()
        sgd.zero_grad()
        arguments = inputs.copy()
        with autocast():
            loss = _loss(model(*arguments.args, **arguments.kwargs))
        loss.backward()  # type: ignore[no-untyped-call]
        backend.step_boundary()
        yield float(loss.detach().cpu())


def _loss(output: Any) -> Tensor:
    return first_tensor(output).float().square().mean()


@contextmanager
def _record_outputs(model: nn.Module, layers: list[Data]) -> Iterator[None]:
    """Record the tensors in every module's output, once per call of the module."""

    def recorder(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            for number, tensor in enumerate(tensors_of(output)):
                label = f"{name or 'the model itself'}" + (f"[{number}]" if number else "")
                layers.append(fingerprint(label, tensor))

        return hook

    handles = [module.register_forward_hook(recorder(name)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def fingerprint(name: str, tensor: Tensor) -> Data:
    """Shape, dtype, hash, root mean square and sketch of a tensor: enough to see by how much two tensors differ."""
    host = tensor.detach().cpu().contiguous()
    flat = host.reshape(-1).double() if not host.is_complex() else torch.view_as_real(host).reshape(-1).double()
    finite = torch.isfinite(flat)
    values = torch.where(finite, flat, 0.0)
    return {
        "name": name,
        "shape": list(host.shape),
        "dtype": name_of(host.dtype),
        "sha256": hashlib.sha256(host.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest(),
        "rms": float(values.square().mean().sqrt()) if flat.numel() else 0.0,
        "not_finite": int(flat.numel() - finite.sum()),
        "sketch": sketch(values.numpy()).tolist(),
    }


def sketch(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Count sketch: add every value, with a pseudorandom sign, to one of 256 sums.

    The distance of two sketches is that of their tensors, within about 9 %, and exact for up to 256 values. Unlike a
    sample, it covers every value. The signs come from a counter-based generator (Philox), so they are the same on every
    machine. Source: Charikar, Chen and Farach-Colton 2002 (the count sketch).
    """
    bits = np.random.Philox(key=0).random_raw(-(-len(values) // 64)).view(np.uint8)
    signed = np.where(np.unpackbits(bits)[: len(values)], values, -values)
    padded = np.zeros(-(-max(len(values), 1) // SKETCH) * SKETCH)
    padded[: len(values)] = signed
    sums: NDArray[np.float64] = padded.reshape(-1, SKETCH).sum(0)
    return sums

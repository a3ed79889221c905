"""Workloads that show which library computed them, by the names of operators or the number of threads."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Observation = tuple[bool, str]


def recorded_operators(work: Callable[[], Any], shapes: bool = False) -> list[Any]:
    """Profile one run, after a warm-up run in which libraries initialize themselves. Returns the profiler's events."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with torch.inference_mode():
        work()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=shapes) as profiler:
            work()
    return list(profiler.events())


def which_ran(work: Callable[[], Any], yes: str, no: str) -> Observation:
    """Return True and the name of an operator that contains `yes`, or False and one that contains `no`."""
    names = [event.name for event in recorded_operators(work)]
    for part, is_on in ((yes, True), (no, False)):
        if matches := [name for name in names if part in name]:
            return is_on, matches[0]
    return False, "neither operator ran; these did: " + ", ".join(sorted(set(names)))


def convolution() -> Observation:
    """Convolve a batch large enough that torch does not use its own loop, and too small for NNPACK."""
    import torch

    images, kernels = torch.rand(4, 32, 28, 28), torch.rand(32, 32, 3, 3)
    work = lambda: torch.nn.functional.conv2d(images, kernels, padding=1)  # noqa: E731
    return which_ran(work, "mkldnn_convolution", "_slow_conv2d_forward")


def nnpack() -> Observation:
    """Convolve with oneDNN off and 17 images: torch uses NNPACK only without oneDNN and for at least 16 images."""
    import torch

    from workers.devices.libraries.library import MKLDNN

    images, kernels = torch.rand(17, 16, 28, 28), torch.rand(16, 16, 3, 3)
    work = lambda: torch.nn.functional.conv2d(images, kernels, padding=1)  # noqa: E731
    old_state = MKLDNN.read()
    MKLDNN.set(False)
    try:
        return which_ran(work, "_nnpack_spatial_convolution", "_slow_conv2d_forward")
    finally:
        MKLDNN.set(old_state)


def attention_layer() -> Observation:
    import torch

    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    tokens = torch.rand(2, 8, 32)
    return which_ran(lambda: layer(tokens), "_transformer_encoder_layer_fwd", "scaled_dot_product_attention")


def einsum() -> Observation:
    """Compute ij,jk,kl with a narrow l: opt_einsum multiplies jk and kl first, plain torch multiplies left to right."""
    import torch

    a, b, c = torch.rand(64, 64), torch.rand(64, 64), torch.rand(64, 4)
    events = recorded_operators(lambda: torch.einsum("ij,jk,kl->il", a, b, c), shapes=True)
    products = [event.input_shapes for event in events if event.name == "aten::bmm"]
    first = products[0] if products else []
    return any(4 in shape for shape in first if shape), f"first aten::bmm of {first}"


def capability() -> Observation:
    import torch

    capability_name = torch.backends.cpu.get_cpu_capability()
    return capability_name not in ("DEFAULT", "NO AVX"), f"CPU capability {capability_name}"


def threads() -> Observation:
    """Count the threads of this process after a matrix product large enough to be parallel."""
    import torch

    torch.rand(512, 512) @ torch.rand(512, 512)
    torch.rand(1 << 20).exp()
    configured, running = torch.get_num_threads(), len(list(Path("/proc/self/task").glob("*")))
    return configured > 1, f"{configured} threads configured, {running} in the process"


def product() -> Observation:
    """Compute a product in a process whose MKL prints every call to stdout (MKL_VERBOSE=1), where the caller looks."""
    import torch

    torch.rand(256, 256) @ torch.rand(256, 256)
    return False, "MKL printed no line"


def placement() -> Observation:
    """Read what the launcher sets for its child process: OpenMP threads, bound to cores."""
    import torch

    configured, cores = os.environ.get("OMP_NUM_THREADS", ""), sorted(os.sched_getaffinity(0))
    return bool(
        configured
    ), f"OMP_NUM_THREADS={configured or 'unset'}, on cores {cores}, {torch.get_num_threads()} threads"

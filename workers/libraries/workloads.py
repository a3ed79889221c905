"""Workloads that show which library computed them, by the names of the operators that ran or of the threads."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Seen = tuple[bool, str]


def recorded_operators(work: Callable[[], Any], shapes: bool = False) -> list[Any]:
    """Events of one run, after one that is not looked at: libraries set themselves up in the first."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with torch.inference_mode():
        work()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=shapes) as watched:
            work()
    return list(watched.events())


def which_ran(work: Callable[[], Any], yes: str, no: str) -> Seen:
    """Whether an operator whose name has `yes` ran, else one that has `no`."""
    names = [event.name for event in recorded_operators(work)]
    for wanted, answer in ((yes, True), (no, False)):
        if found := [name for name in names if wanted in name]:
            return answer, found[0]
    return False, "neither was seen: " + ", ".join(sorted(set(names)))


def convolution() -> Seen:
    """Large enough that torch does not keep it for its own loop, and a batch below what NNPACK takes."""
    import torch

    images, kernels = torch.rand(4, 32, 28, 28), torch.rand(32, 32, 3, 3)
    work = lambda: torch.nn.functional.conv2d(images, kernels, padding=1)  # noqa: E731
    return which_ran(work, "mkldnn_convolution", "_slow_conv2d_forward")


def nnpack() -> Seen:
    """Torch asks NNPACK only where oneDNN is off and the batch has at least 16 images."""
    import torch

    from workers.libraries.switches import MKLDNN

    images, kernels = torch.rand(17, 16, 28, 28), torch.rand(16, 16, 3, 3)
    work = lambda: torch.nn.functional.conv2d(images, kernels, padding=1)  # noqa: E731
    before = MKLDNN.read()
    MKLDNN.set(False)
    try:
        return which_ran(work, "_nnpack_spatial_convolution", "_slow_conv2d_forward")
    finally:
        MKLDNN.set(before)


def attention_layer() -> Seen:
    import torch

    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    tokens = torch.rand(2, 8, 32)
    return which_ran(lambda: layer(tokens), "_transformer_encoder_layer_fwd", "scaled_dot_product_attention")


def einsum() -> Seen:
    """ij,jk,kl with a narrow l: the cheap order multiplies jk and kl first, plain torch goes from left to right."""
    import torch

    a, b, c = torch.rand(64, 64), torch.rand(64, 64), torch.rand(64, 4)
    events = recorded_operators(lambda: torch.einsum("ij,jk,kl->il", a, b, c), shapes=True)
    products = [event.input_shapes for event in events if event.name == "aten::bmm"]
    first = products[0] if products else []
    return any(4 in shape for shape in first if shape), f"first aten::bmm of {first}"


def capability() -> Seen:
    import torch

    found = torch.backends.cpu.get_cpu_capability()
    return found not in ("DEFAULT", "NO AVX"), f"CPU capability {found}"


def threads() -> Seen:
    """Threads of this process after a product large enough to be shared out."""
    import torch

    torch.rand(512, 512) @ torch.rand(512, 512)
    torch.rand(1 << 20).exp()
    asked, running = torch.get_num_threads(), len(list(Path("/proc/self/task").glob("*")))
    return asked > 1, f"{asked} threads asked for, {running} in the process"


def product() -> Seen:
    """For a process whose MKL tells every call on stdout (MKL_VERBOSE=1): the caller looks there."""
    import torch

    torch.rand(256, 256) @ torch.rand(256, 256)
    return False, "no line of MKL"


def placement() -> Seen:
    """What the launcher sets for its child: threads bound to cores, and told to OpenMP."""
    import torch

    asked, cores = os.environ.get("OMP_NUM_THREADS", ""), sorted(os.sched_getaffinity(0))
    return bool(asked), f"OMP_NUM_THREADS={asked or 'unset'}, on cores {cores}, {torch.get_num_threads()} threads"

"""Facts about a device that the preparation of models needs, as data: backends contain no code about models."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traits:
    """Capabilities that decide how a model is prepared.

    compiler          `backend` argument of torch.compile, `ipex` for IPEX's operators, or "" for none
    channels_last     precisions in which convolutions may be faster in the channels_last memory format
    fused_optimizers  torch's fused and foreach optimizer steps run on this device
    graph_captures    a lazy device compiles each step's graph anyway, so training needs no torch.compile
    autotunes         the compiler has a mode that searches for the fastest kernels
    """

    compiler: str = "inductor"
    channels_last: tuple[str, ...] = ("float32", "bfloat16", "float16")
    fused_optimizers: bool = True
    graph_captures: bool = False
    autotunes: bool = True

"""What a back end tells those who prepare models for its device: data, so that nothing of models is in a back end."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traits:
    """`compiler` is a name that torch.compile takes as its `backend`, `ipex` for IPEX's operators, or "" for none.

    channels_last     precisions whose convolutions may be faster with their channels side by side
    fused_optimizers  torch's fused and foreach implementations of a step run on this device
    graph_captures    a lazy device compiles each step's graph anyway: training needs no compiler of ours
    autotunes         the compiler has a mode that searches for the fastest kernels
    """

    compiler: str = "inductor"
    channels_last: tuple[str, ...] = ("float32", "bfloat16", "float16")
    fused_optimizers: bool = True
    graph_captures: bool = False
    autotunes: bool = True

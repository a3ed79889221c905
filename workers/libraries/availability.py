"""Why a library cannot be used in this process, "" when it can, and of which version it is."""

import importlib
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from workers.libraries import torch_build


def torch() -> Any:
    return importlib.import_module("torch")


def cuda() -> str:
    if not torch().backends.cuda.is_built():
        return f"torch {torch().__version__} is built without CUDA"
    return "" if torch().cuda.is_available() else f"torch {torch().__version__} sees no NVIDIA device"


def mps() -> str:
    if not torch().backends.mps.is_built():
        return f"torch {torch().__version__} is built without MPS"
    return "" if torch().backends.mps.is_available() else "no Apple GPU, or macOS below 14"


def cudnn() -> str:
    return cuda() or ("" if torch().backends.cudnn.is_available() else "cuDNN does not load")


def cusparselt() -> str:
    return cuda() or ("" if torch().backends.cusparselt.is_available() else "cuSPARSELt does not load")


def built(name: str) -> str:
    """For mkl, mkldnn, openmp, nnpack: torch.backends.<name>.is_available()."""
    here = importlib.import_module(f"torch.backends.{name}").is_available()
    return "" if here else f"torch {torch().__version__} is built without it, or this CPU cannot run it"


def triton() -> str:
    if find_spec("triton") is None:
        return "the package triton is not in this environment"
    here = torch().cuda.is_available() or torch().xpu.is_available()
    return "" if here else "triton compiles for GPUs, and torch sees none"


def nki() -> str:
    if find_spec("neuronxcc") is None:
        return "the package neuronx-cc, which holds NKI, is not in this environment"
    return "" if find_spec("neuronxcc.nki") else "this neuronx-cc holds no NKI"


def opt_einsum() -> str:
    here = importlib.import_module("torch.backends.opt_einsum").is_available()
    return "" if here else "the package opt_einsum is not in this environment"


def mha() -> str:
    return "" if find_spec("torch.backends.mha") else f"torch {torch().__version__} has no switch for it"


def xeon() -> str:
    if not sys.platform.startswith("linux"):
        return "the launcher is for Linux"
    return "" if find_spec("torch.backends.xeon") else f"torch {torch().__version__} has no launcher"


def package(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def cudnn_version() -> str:
    return "" if cudnn() else str(torch().backends.cudnn.version())


def cusparselt_version() -> str:
    return "" if cusparselt() else str(torch().backends.cusparselt.version())


MKL = r"Math Kernel Library Version (\S+?)-"
ONEDNN = r"MKL-DNN v(\S+)"
OPENMP = r"OpenMP (\d+)"


def torch_build_version(pattern: str) -> str:
    return torch_build.release(pattern)

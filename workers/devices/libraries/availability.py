"""Availability of libraries: a function returns the reason why one cannot be used in this process, "" if it can."""

import importlib
import re
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any


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
    """Check mkl, mkldnn, openmp or nnpack by torch.backends.<name>.is_available()."""
    is_available = importlib.import_module(f"torch.backends.{name}").is_available()
    return "" if is_available else f"torch {torch().__version__} is built without it, or this CPU cannot run it"


def triton() -> str:
    if find_spec("triton") is None:
        return "triton is not installed in this environment"
    has_gpu = torch().cuda.is_available() or torch().xpu.is_available()
    return "" if has_gpu else "triton compiles for GPUs, but torch sees none"


def nki() -> str:
    if find_spec("neuronxcc") is None:
        return "neuronx-cc, which contains NKI, is not installed in this environment"
    return "" if find_spec("neuronxcc.nki") else "the installed neuronx-cc does not contain NKI"


def opt_einsum() -> str:
    is_available = importlib.import_module("torch.backends.opt_einsum").is_available()
    return "" if is_available else "opt_einsum is not installed in this environment"


def mha() -> str:
    return "" if find_spec("torch.backends.mha") else f"torch {torch().__version__} has no torch.backends.mha"


def xeon() -> str:
    if not sys.platform.startswith("linux"):
        return "the launcher runs on Linux only"
    return "" if find_spec("torch.backends.xeon") else f"torch {torch().__version__} has no torch.backends.xeon"


def installed_version(name: str) -> str:
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


@cache
def torch_build() -> str:
    """Return the build settings of the installed torch."""
    return str(torch().__config__.show())


def build_flags(names: tuple[str, ...]) -> list[str]:
    """Return `NAME=value`, such as `USE_MKL=ON`, for each of `names` in the build settings."""
    return [f"{name}={match[1]}" for name in names if (match := re.search(rf"\b{name}=([^,\s]*)", torch_build()))]


def torch_build_version(pattern: str) -> str:
    """Return the first group of a pattern in the build settings, "" without a match."""
    match = re.search(pattern, torch_build())
    return match[1] if match else ""

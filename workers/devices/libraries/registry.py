"""The fourteen libraries, in the order of torch.backends. Importing this imports no torch."""

from functools import partial

from cluster.errors import UserError, nearest
from workers.devices.libraries import availability, workloads
from workers.devices.libraries.library import CUDNN, MHA, MKLDNN, NNPACK, OPT_EINSUM, Library

HOST, NVIDIA = ("cpu",), ("nvidia",)
ALIASES = {"onednn": "mkldnn", "mha_fastpath": "mha", "omp": "openmp"}

LIBRARIES: dict[str, Library] = {
    library.name: library
    for library in (
        Library("cuda", "CUDA", True, NVIDIA, ("an NVIDIA driver",), availability.cuda,
                lambda: str(availability.torch().version.cuda or ""), ("USE_CUDA", "CUDA_VERSION"),
                fresh={True: {}, False: {"CUDA_VISIBLE_DEVICES": ""}}),
        Library("cpu", "CPU kernels of torch", False, HOST, (), lambda: "",
                lambda: str(availability.torch().backends.cpu.get_cpu_capability()),
                ("PERF_WITH_AVX", "PERF_WITH_AVX2"),
                fresh={True: {}, False: {"ATEN_CPU_CAPABILITY": "default"}}, observe=workloads.capability),
        Library("mps", "Metal Performance Shaders", True, ("apple",), ("macOS 14",), availability.mps, lambda: ""),
        Library("cudnn", "cuDNN", True, NVIDIA, ("libcudnn",), availability.cudnn, availability.cudnn_version,
                ("USE_CUDNN", "CUDNN_VERSION"), switch=CUDNN),
        Library("mkl", "Intel MKL", False, HOST, ("libmkl",), partial(availability.built, "mkl"),
                partial(availability.torch_build_version, availability.MKL), ("USE_MKL", "BLAS_INFO", "LAPACK_INFO"),
                fresh={True: {"MKL_VERBOSE": "1"}}, observe=workloads.product),
        Library("mkldnn", "oneDNN (MKL-DNN)", False, HOST, ("libdnnl",), partial(availability.built, "mkldnn"),
                partial(availability.torch_build_version, availability.ONEDNN), ("USE_MKLDNN",), switch=MKLDNN,
                observe=workloads.convolution),
        Library("openmp", "OpenMP", False, HOST, ("libgomp or libiomp5",), partial(availability.built, "openmp"),
                partial(availability.torch_build_version, availability.OPENMP), ("USE_OPENMP",),
                fresh={True: {"OMP_NUM_THREADS": "2"}, False: {"OMP_NUM_THREADS": "1"}}, observe=workloads.threads),
        Library("nki", "Neuron Kernel Interface", True, ("neuron",), ("neuronx-cc",), availability.nki,
                partial(availability.installed_version, "neuronx-cc")),
        Library("triton", "Triton", True, ("nvidia", "amd", "intel"), ("triton",), availability.triton,
                partial(availability.installed_version, "triton")),
        Library("cusparselt", "cuSPARSELt", True, NVIDIA, ("libcusparseLt",), availability.cusparselt,
                availability.cusparselt_version, ("USE_CUSPARSELT",)),
        Library("mha", "Fast path of multi-head attention", False, ("cpu", "nvidia", "amd"), (), availability.mha,
                lambda: "", switch=MHA, observe=workloads.attention_layer),
        Library("nnpack", "NNPACK", False, HOST, (), partial(availability.built, "nnpack"), lambda: "", ("USE_NNPACK",),
                switch=NNPACK, observe=workloads.nnpack),
        Library("opt_einsum", "opt_einsum", False, ("cpu", "nvidia", "amd", "intel", "tpu", "apple"), ("opt_einsum",),
                availability.opt_einsum, partial(availability.installed_version, "opt-einsum"),
                switch=OPT_EINSUM, observe=workloads.einsum),
        Library("xeon", "Launcher for Xeon", False, HOST, (), availability.xeon, lambda: "",
                launcher=("python", "-m", "torch.backends.xeon.run_cpu"), observe=workloads.placement),
    )
}  # fmt: skip


def list_libraries() -> list[str]:
    return list(LIBRARIES)


def get_library(name: str) -> Library:
    """Return a library by name or alias, in any case. Raises UserError naming the nearest."""
    requested = str(name).lower()
    resolved = ALIASES.get(requested, requested)
    if resolved not in LIBRARIES:
        raise UserError(f"unknown library {name!r}", nearest(requested, [*LIBRARIES, *ALIASES]))
    return LIBRARIES[resolved]

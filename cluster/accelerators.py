"""One table of accelerator facts: what each backend is called, how Ray counts it, and how its devices are shown or
hidden.

Sources: torch's device types; Ray 2.60's accelerator managers (resource names and visibility variables); pool
environments.
"""

from dataclasses import dataclass

from cluster.errors import UserError, nearest


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Facts of one backend. `visibility` is the variable that limits a process to some devices, "" if none."""

    backend: str
    aliases: tuple[str, ...]
    torch_device: str
    ray_resource: str
    visibility: str
    environment: str
    title: str


TABLE: dict[str, Accelerator] = {
    a.backend: a
    for a in (
        Accelerator("nvidia", ("cuda",), "cuda", "GPU", "CUDA_VISIBLE_DEVICES", "nvidia", "NVIDIA GPU"),
        Accelerator("amd", ("rocm", "hip"), "cuda", "GPU", "HIP_VISIBLE_DEVICES", "amd", "AMD GPU"),
        Accelerator("tpu", ("xla",), "xla", "TPU", "TPU_VISIBLE_CHIPS", "xla", "Google TPU"),
        Accelerator("intel", ("xpu",), "xpu", "GPU", "ZE_AFFINITY_MASK", "intel", "Intel GPU"),
        Accelerator("neuron", (), "xla", "neuron_cores", "NEURON_RT_VISIBLE_CORES", "neuron", "AWS Neuron"),
        Accelerator("apple", ("mps",), "mps", "GPU", "", "apple", "Apple GPU"),
        Accelerator("cpu", (), "cpu", "CPU", "", "cpu", "CPU"),
    )
}
ALIASES: dict[str, str] = {alias: a.backend for a in TABLE.values() for alias in a.aliases}

# A device of one of these models computes on the CPU: asked for by its full name or its pool, never by `any` or by its
# backend.
EMULATED = "emulated"


def backend_name(word: str) -> str:
    """The backend for a name or an alias, in any case. Raises UserError naming the nearest."""
    name = word.lower()
    name = ALIASES.get(name, name)
    if name not in TABLE:
        raise UserError(f"unknown backend {word!r}", nearest(word.lower(), [*TABLE, *ALIASES]))
    return name


def ray_resource(backend: str, emulated: bool) -> str:
    """The Ray resource that backs a reservation of one device: an emulated device is counted as the CPU it is."""
    return "CPU" if emulated else TABLE[backend].ray_resource

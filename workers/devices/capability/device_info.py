"""Description of one device, with the field names of other libraries: a frozen pydantic model."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from cluster.types import Scalar


class DeviceInfo(BaseModel):
    """One device. Bytes are None if unknown; `free_memory_bytes` is that of the time of the query.

    `device_type` is torch's name (`cuda:0`, `xla:0`, `xpu:0`, `mps:0`, `cpu`), `architecture` the SM version (`sm_90`),
    gfx number (`gfx942`), TPU generation (`v5e`) or instruction set (`x86_64`). `supported_dtypes` are names
    (`bfloat16`); `dtypes_from` says whether they were `probed` on the device or are `documented`. `fp8_supported` is
    None if unknown; `topology` is that of a TPU's slice (`2x4`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: str
    device_type: str
    device_id: int
    device_name: str
    kind: str
    uuid: str = ""
    architecture: str = ""
    compute_capability: str = ""
    total_memory_bytes: int | None = None
    free_memory_bytes: int | None = None
    integrated: bool = False
    unified_memory: bool = False
    driver_version: str = ""
    runtime_versions: dict[str, str] = {}
    supported_dtypes: tuple[str, ...] = ()
    dtypes_from: str = "unknown"
    fp8_supported: bool | None = None
    tpu_version: str = ""
    topology: str = ""
    is_available: bool = True
    unavailable_reason: str = ""
    emulated: bool = False
    pci_address: str = ""
    numa_node: int | None = None
    properties: dict[str, Scalar] = {}

    @property
    def total_memory_gb(self) -> float:
        """Memory in GiB, which CUDA, ROCm and most libraries call GB; 0.0 if unknown."""
        return (self.total_memory_bytes or 0) / 2**30

    @property
    def total_memory_mb(self) -> float:
        """Memory in MiB; 0.0 if unknown."""
        return (self.total_memory_bytes or 0) / 2**20

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, with `total_memory_gb`."""
        return self.model_dump(mode="json") | {"total_memory_gb": round(self.total_memory_gb, 2)}

"""The back ends as an enumeration, for callers who prefer one to strings."""

from enum import StrEnum

from cluster.accelerators import ALIASES, TABLE
from cluster.errors import UserError, nearest


class BackendType(StrEnum):
    """One member per vendor, and AUTO: the best that is here."""

    AUTO = "auto"
    NVIDIA = "nvidia"
    AMD = "amd"
    TPU = "tpu"
    INTEL = "intel"
    NEURON = "neuron"
    APPLE = "apple"
    CPU = "cpu"

    @classmethod
    def from_string(cls, word: str) -> "BackendType":
        """A name or an alias (`cuda`, `rocm`, `xla`, `xpu`, `mps`) in any case. Raises UserError naming the nearest."""
        name = ALIASES.get(str(word).lower(), str(word).lower())
        if name not in {member.value for member in cls}:
            raise UserError(f"unknown backend {word!r}", nearest(str(word).lower(), ["auto", *TABLE, *ALIASES]))
        return cls(name)

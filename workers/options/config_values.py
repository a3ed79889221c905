"""Types of the configuration's values: what is accepted, and how it is converted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from cluster.catalogue import backend_name
from cluster.errors import UserError
from workers.devices.libraries.registry import get_library
from workers.options.device_preference import resolve_kinds

MAX_REPR_LENGTH = 80


def _parse_names(value: object) -> object:
    """Parse a list that was written as text, as in the environment: `nvidia,cpu`, or JSON."""
    if not isinstance(value, str):
        return value
    return json.loads(value) if value.lstrip().startswith("[") else split_names(value)


def _map_each(rule: Callable[[str], tuple[str, ...]]) -> AfterValidator:
    """Replace every name by the names that `rule` returns for it, or convert its UserError."""

    def replaced(value: tuple[str, ...]) -> tuple[str, ...]:
        try:
            return tuple(result for name in value for result in rule(name))
        except UserError as e:
            raise ValueError(str(e)) from None

    return AfterValidator(replaced)


def _reject_bool(value: object) -> object:
    """Reject booleans: pydantic would accept True as 1."""
    if isinstance(value, bool):
        raise ValueError("a number is needed")
    return value


def _reject_empty_path(value: object) -> object:
    """Reject "": Path("") would be the current folder, which is hardly intended."""
    if isinstance(value, str) and not value.strip():
        raise ValueError("name a folder, or omit the option")
    return value


Fraction = Annotated[float, BeforeValidator(_reject_bool), Field(gt=0, le=1)]
# A limit far above any machine's cores: torch starts as many threads as this option says.
Threads = Annotated[int, BeforeValidator(_reject_bool), Field(gt=0, le=4096)]
Folder = Annotated[Path, BeforeValidator(_reject_empty_path)]
Backends = Annotated[tuple[str, ...], BeforeValidator(_parse_names), _map_each(lambda name: (backend_name(name),))]
Kinds = Annotated[tuple[str, ...], BeforeValidator(_parse_names), _map_each(resolve_kinds)]
Libraries = Annotated[tuple[str, ...], BeforeValidator(_parse_names), _map_each(lambda name: (get_library(name).name,))]
Precision = Literal["float32", "bfloat16", "float16"]
Attention = Literal["auto", "measured", "flash", "efficient", "cudnn", "math"]
CPUAttention = Literal["auto", "measured", "flash", "math"]  # torch has no other kernels for the CPU
Engine = Literal["torch", "ipex"]
MatmulPrecision = Literal["highest", "high", "medium"]
XLAPrecision = Literal["default", "high", "highest"]
Topology = Annotated[str, Field(pattern=r"^\d+,\d+,\d+$")]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


def split_names(text: str) -> tuple[str, ...]:
    """Split a text such as `nvidia, cpu` at its commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def short_repr(value: object) -> str:
    """Format a value for an error message, cut to MAX_REPR_LENGTH characters."""
    text = repr(value)
    return text if len(text) <= MAX_REPR_LENGTH else f"{text[:MAX_REPR_LENGTH]}..."

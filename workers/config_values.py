"""The types of the configuration's values: what is accepted, and what it becomes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from cluster.catalogue import backend_name
from cluster.errors import UserError
from workers.libraries.registry import get_library
from workers.selection.device_preference import checked

LONGEST_SHOWN = 80


def _names(value: object) -> object:
    """In the environment a list is written as people write PATH-like things, `nvidia,cpu`, or as JSON."""
    if not isinstance(value, str):
        return value
    return json.loads(value) if value.lstrip().startswith("[") else split(value)


def _each(rule: Callable[[str], tuple[str, ...]]) -> AfterValidator:
    """Every name replaced by the names `rule` makes of it; its UserError says what is wrong with one."""

    def replaced(value: tuple[str, ...]) -> tuple[str, ...]:
        try:
            return tuple(found for name in value for found in rule(name))
        except UserError as e:
            raise ValueError(str(e)) from None

    return AfterValidator(replaced)


def _no_truth(value: object) -> object:
    """pydantic would take True for 1."""
    if isinstance(value, bool):
        raise ValueError("a number is needed")
    return value


def _no_empty_path(value: object) -> object:
    """Path("") is the current folder, which nobody means."""
    if isinstance(value, str) and not value.strip():
        raise ValueError("name a folder, or leave it out")
    return value


Fraction = Annotated[float, BeforeValidator(_no_truth), Field(gt=0, le=1)]
# Far above any machine's: torch takes the number as it is, and starts as many threads.
Threads = Annotated[int, BeforeValidator(_no_truth), Field(gt=0, le=4096)]
Folder = Annotated[Path, BeforeValidator(_no_empty_path)]
Backends = Annotated[tuple[str, ...], BeforeValidator(_names), _each(lambda name: (backend_name(name),))]
Kinds = Annotated[tuple[str, ...], BeforeValidator(_names), _each(checked)]
Libraries = Annotated[tuple[str, ...], BeforeValidator(_names), _each(lambda name: (get_library(name).name,))]
Precision = Literal["float32", "bfloat16", "float16"]
Attention = Literal["auto", "flash", "efficient", "math"]
CPUAttention = Literal["auto", "flash", "math"]  # torch has no memory-efficient kernel for the CPU
Engine = Literal["torch", "ipex"]
MatmulPrecision = Literal["highest", "high", "medium"]
XLAPrecision = Literal["default", "high", "highest"]
Topology = Annotated[str, Field(pattern=r"^\d+,\d+,\d+$")]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


def split(text: str) -> tuple[str, ...]:
    """`nvidia, cpu` as a tuple."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def short_repr(value: object) -> str:
    """A value in an error message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."

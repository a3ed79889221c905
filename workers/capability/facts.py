"""What is written about a kind of device, without opening one: a table with sources, and rules for dtypes.

devices.csv holds figures per card as vendors and others publish them; `devices_per_card` is how many devices torch sees
of one. Imports the standard library only.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cluster.vocabulary import Scalar

INTEGERS = ("bool", "int16", "int32", "int64", "int8", "uint8")
FP8_FN = ("float8_e4m3fn", "float8_e5m2")
FP8_FNUZ = ("float8_e4m3fnuz", "float8_e5m2fnuz")
# AMD's MI300 series has the fnuz flavour, in which the same bits mean half the value; later ones have OCP's, which is
# NVIDIA's. Source: ROCm's table of data types.
FNUZ_ARCHITECTURES = ("gfx940", "gfx941", "gfx942")
OCP_ARCHITECTURES = ("gfx950", "gfx1200", "gfx1201")


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Published figures of one card, dense. None where no source gives one; `yes`, `no` and longer words as the
    sources have them.
    """

    kind: str
    devices_per_card: int
    memory_gb: float | None
    mem_bw_gbs: float | None
    bf16_tflops: float | None
    fp16_tflops: float | None
    tf32_tflops: float | None
    fp32_tflops: float | None
    fp64_tflops: float | None
    fp8_tflops: float | None
    int8_tops: float | None
    tdp_w: float | None
    mamf_bf16_tflops: float | None
    bf16_native: str
    fp8_native: str
    fp64_native: str
    source_kind: str
    notes: str
    source: str


NUMBERS = tuple(n for n, kind in DeviceFacts.__annotations__.items() if kind == (float | None))


@cache
def table() -> dict[str, DeviceFacts]:
    """Every row of devices.csv by its kind."""
    text = (Path(__file__).parent / "devices.csv").read_text()
    return {row["kind"]: _facts(row) for row in csv.DictReader(text.splitlines())}


def _facts(row: dict[str, str]) -> DeviceFacts:
    numbers = {name: float(row[name]) if row[name] else None for name in NUMBERS}
    words = {name: value for name, value in row.items() if name not in NUMBERS and name != "devices_per_card"}
    return DeviceFacts(devices_per_card=int(row["devices_per_card"]), **numbers, **words)  # type: ignore[arg-type]


def device_facts(kind: str) -> DeviceFacts | None:
    """The row of a kind, of the card for one of its MIG slices; None where nothing is written."""
    return table().get(kind.partition("-MIG-")[0])


def documented_dtypes(
    backend: str, kind: str, architecture: str = "", properties: Mapping[str, Scalar] | None = None
) -> tuple[str, ...]:
    """Names of dtypes that a device computes with natively, by its documents; () where nothing is known of it."""
    rule = RULES.get(backend)
    return tuple(sorted({*INTEGERS, "float32", *rule(kind, architecture, properties or {})})) if rule else ()


def _nvidia(kind: str, architecture: str, properties: Mapping[str, Scalar]) -> tuple[str, ...]:
    """Source: NVIDIA's CUDA programming guide, arithmetic by compute capability."""
    digits = architecture.removeprefix("sm_")
    capability = int(digits) if digits.isdigit() else 0
    found: tuple[str, ...] = ("float16", "float64", "complex64", "complex128") if capability >= 60 else ()
    return found + (("bfloat16",) if capability >= 80 else ()) + (FP8_FN if capability >= 89 else ())


def _amd(kind: str, architecture: str, properties: Mapping[str, Scalar]) -> tuple[str, ...]:
    fp8 = FP8_FNUZ if architecture in FNUZ_ARCHITECTURES else FP8_FN if architecture in OCP_ARCHITECTURES else ()
    return ("float16", "float64", "complex64", "complex128", "bfloat16", *fp8)


def _tpu(kind: str, architecture: str, properties: Mapping[str, Scalar]) -> tuple[str, ...]:
    """Source: Google's TPU system architecture. v6e runs fp8 at the rate of bf16, v7x has units for it."""
    if kind == "tpu:emulated":
        return ("bfloat16", "float16", "float64", "complex64")
    return ("bfloat16", *(FP8_FN if kind == "tpu:v7x" else ()))


def _intel(kind: str, architecture: str, properties: Mapping[str, Scalar]) -> tuple[str, ...]:
    fp64 = ("float64", "complex128") if kind.startswith("intel:Max") else ()
    fp8 = FP8_FN if kind.startswith("intel:Gaudi") else ()
    return ("float16", "bfloat16", *fp64, *fp8)


def _neuron(kind: str, architecture: str, properties: Mapping[str, Scalar]) -> tuple[str, ...]:
    """Source: AWS's pages of each chip; its cFP8 and MX formats are not torch's dtypes."""
    return ("float16", "bfloat16")


def _apple(kind: str, architecture: str, properties: Mapping[str, Scalar]) -> tuple[str, ...]:
    """Metal has no float64 (pytorch#122602); bfloat16 from macOS 14 on, which torch's MPS needs anyway."""
    return ("float16", "bfloat16", "complex64")


def _cpu(kind: str, architecture: str, properties: Mapping[str, Scalar]) -> tuple[str, ...]:
    """By instruction sets: without units for it, float16 is ~180 times slower than bfloat16 (measured, AMD Zen 5)."""
    has = {name for name, value in properties.items() if value is True}
    found = ["float64", "complex64", "complex128"]
    found += ["bfloat16"] if has & {"avx512_bf16", "amx_bf16", "bf16"} else []
    found += ["float16"] if has & {"avx512_fp16", "amx_fp16", "asimdhp"} else []
    return tuple(found)


RULES = {
    "nvidia": _nvidia,
    "amd": _amd,
    "tpu": _tpu,
    "intel": _intel,
    "neuron": _neuron,
    "apple": _apple,
    "cpu": _cpu,
}

"""Documented features of a kind of device, besides dtypes.

Jobs may require them, and `capabilities` lists them.
"""

import re
from functools import cache

from cluster.catalogue.kind_names import EMULATED
from cluster.catalogue.lookup import architecture, architecture_of
from cluster.catalogue.tables import architectures, vendors

FEATURES = ("custom_kernels", "flash_attention", "fp8_flavour", "xla", "dynamic_shapes", "collectives", "compile")
ABSENT_VALUES = frozenset({"no", "none"})
"""First words of a value that mean that the feature does not exist."""

Value = bool | str | None


def features(kind: str) -> dict[str, Value]:
    """Return for each of FEATURES whether the kind has it, or the variant; None if not documented."""
    row = vendors().get(kind.partition(":")[0])
    if row is None:
        return dict.fromkeys(FEATURES)
    facts, emulated = architecture(row.backend, architecture_of(kind)), kind.endswith(f":{EMULATED}")
    return {
        "custom_kernels": "none: they are for the real device" if emulated else row.kernels or None,
        "flash_attention": False if emulated else row.flash_attention,
        "fp8_flavour": (facts.fp8_flavour or None) if facts else None,
        "xla": row.torch_device == "xla",
        "dynamic_shapes": row.dynamic_shapes or None,
        "collectives": "gloo" if emulated else row.collectives or None,
        "compile": row.compiler or None,
    }


def offers(kind: str, requested: str) -> bool | None:
    """Return whether devices of a kind have a feature, e.g. `flash_attention` or `collectives=nccl`.

    None if that is not documented.
    """
    name, _, variant = requested.partition("=")
    value = features(kind)[name]
    if value is None or isinstance(value, bool):
        return value
    return variant.lower() in _variants_in(value) if variant else not ABSENT_VALUES & set(_variants_in(value)[:1])


@cache
def feature_choices() -> tuple[str, ...]:
    """Return all that a job may require: each feature, alone and with each of its variants."""
    variants = {name: set[str]() for name in FEATURES}
    for row in vendors().values():
        for name, value in (
            ("custom_kernels", row.kernels),
            ("collectives", row.collectives),
            ("compile", row.compiler),
        ):
            variants[name] |= set(_variants_in(value))
    variants["fp8_flavour"] = {row.fp8_flavour for row in architectures().values()} - {""}
    combined = [f"{name}={variant}" for name in FEATURES for variant in sorted(variants[name] - ABSENT_VALUES)]
    return (*FEATURES, *combined)


def _variants_in(value: str) -> list[str]:
    """Return the words of a value: inductor and triton for `inductor (Triton)`.

    Several words in brackets, and text behind a colon, are explanations and are left out.
    """
    plain = re.sub(r"\([^)]* [^)]*\)", "", value.partition(":")[0])
    return re.findall(r"[\w+-]+", plain.lower())

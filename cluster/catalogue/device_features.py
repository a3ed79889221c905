"""What a kind of device offers beside dtypes, by its documents: what a job may ask for, and capabilities tell."""

import re
from functools import cache

from cluster.catalogue.kind_names import EMULATED
from cluster.catalogue.lookup import architecture, architecture_of
from cluster.catalogue.tables import architectures, vendors

FEATURES = ("custom_kernels", "flash_attention", "fp8_flavour", "xla", "dynamic_shapes", "collectives", "compile")
NONE = frozenset({"no", "none"})
"""First words of a value that says that there is none."""

Value = bool | str | None


def features(kind: str) -> dict[str, Value]:
    """Each of FEATURES: whether there is one, or which; None where nobody wrote it down."""
    row = vendors().get(kind.partition(":")[0])
    if row is None:
        return dict.fromkeys(FEATURES)
    known, emulated = architecture(row.backend, architecture_of(kind)), kind.endswith(f":{EMULATED}")
    return {
        "custom_kernels": "none: they are for the real device" if emulated else row.kernels or None,
        "flash_attention": False if emulated else row.flash_attention,
        "fp8_flavour": (known.fp8_flavour or None) if known else None,
        "xla": row.torch_device == "xla",
        "dynamic_shapes": row.dynamic_shapes or None,
        "collectives": "gloo" if emulated else row.collectives or None,
        "compile": row.compiler or None,
    }


def offers(kind: str, asked: str) -> bool | None:
    """Whether devices of a kind have `flash_attention`, or of `collectives=nccl` that one; None: nobody knows."""
    name, _, which = asked.partition("=")
    value = features(kind)[name]
    if value is None or isinstance(value, bool):
        return value
    return which.lower() in _words(value) if which else not NONE & set(_words(value)[:1])


@cache
def feature_words() -> tuple[str, ...]:
    """All that may be asked for: each feature, and each with a word that says which."""
    found = {name: set[str]() for name in FEATURES}
    for row in vendors().values():
        for name, value in (
            ("custom_kernels", row.kernels),
            ("collectives", row.collectives),
            ("compile", row.compiler),
        ):
            found[name] |= set(_words(value))
    found["fp8_flavour"] = {row.fp8_flavour for row in architectures().values()} - {""}
    told = [f"{name}={word}" for name in FEATURES for word in sorted(found[name] - NONE)]
    return (*FEATURES, *told)


def _words(value: str) -> list[str]:
    """`inductor (Triton)` as inductor and triton; several words in brackets explain, as does what follows a colon."""
    plain = re.sub(r"\([^)]* [^)]*\)", "", value.partition(":")[0])
    return re.findall(r"[\w+-]+", plain.lower())

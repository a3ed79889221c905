"""What is known of vendors and models: CSV files beside this one, and those of installed distributions.

vendors.csv, tiers.csv, architectures.csv, models.csv, dtypes.csv and sources.csv; nothing else in the code knows that
an H100 exists. Each file is read on first use.
"""

from cluster.catalogue.lookup import (
    architecture,
    architecture_of,
    computes,
    found,
    instruction_sets,
    kept,
    lost,
    model,
    relatives,
    tier,
)
from cluster.catalogue.naming import (
    EMULATED,
    aliases,
    backend_name,
    is_backend,
    known_kind,
    meets,
    ray_resource,
    spelled,
    vendor,
    words,
)
from cluster.catalogue.tables import (
    Architecture,
    Model,
    Vendor,
    architectures,
    dtype_notes,
    models,
    own_vendors,
    sources,
    tiers,
    vendors,
)

__all__ = [
    "EMULATED",
    "Architecture",
    "Model",
    "Vendor",
    "aliases",
    "architecture",
    "architecture_of",
    "architectures",
    "backend_name",
    "computes",
    "dtype_notes",
    "found",
    "instruction_sets",
    "is_backend",
    "kept",
    "known_kind",
    "lost",
    "meets",
    "model",
    "models",
    "own_vendors",
    "ray_resource",
    "relatives",
    "sources",
    "spelled",
    "tier",
    "tiers",
    "vendor",
    "vendors",
    "words",
]

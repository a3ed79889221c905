"""What is known of vendors and models: CSV files beside this one, and those of installed distributions.

vendors.csv, tiers.csv, architectures.csv, models.csv, kubernetes.csv, dtypes.csv and sources.csv; nothing else in the
code knows that an H100 exists. Each file is read on first use.
"""

from cluster.catalogue.lookup import (
    architecture,
    architecture_of,
    computes,
    found,
    instruction_sets,
    kept,
    kubernetes_label,
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
from cluster.catalogue.offering import FEATURES, feature_words, features, offers
from cluster.catalogue.tables import (
    Architecture,
    Model,
    Vendor,
    architectures,
    dtype_notes,
    kubernetes_labels,
    models,
    own_vendors,
    sources,
    tiers,
    vendors,
)

__all__ = [
    "EMULATED",
    "FEATURES",
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
    "feature_words",
    "features",
    "found",
    "instruction_sets",
    "is_backend",
    "kept",
    "known_kind",
    "kubernetes_label",
    "kubernetes_labels",
    "lost",
    "meets",
    "model",
    "models",
    "offers",
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

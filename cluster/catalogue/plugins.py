"""Distributions that add a vendor, by their entry points: looked for on first need and remembered.

`polyfleet.vendors` names a module or package whose folder holds vendors.csv and, if it likes, models.csv,
architectures.csv, dtypes.csv and sources.csv; `polyfleet.discovery` a module with `present` and `find`;
`polyfleet.backends` a back end's class.
"""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import UserError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

VENDORS, DISCOVERY, BACKENDS = "polyfleet.vendors", "polyfleet.discovery", "polyfleet.backends"


@cache
def entries(group: str) -> "dict[str, EntryPoint]":
    """By name; of two with one name the first on the path stays."""
    from importlib.metadata import entry_points  # 20 ms that most commands need not wait

    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        found.setdefault(entry.name, entry)
    return found


@cache
def folders() -> tuple[tuple[Path, str], ...]:
    """(folder, distribution) of each entry of `polyfleet.vendors`. Raises UserError for one without its file."""
    return tuple((_folder(entry), _distribution(entry)) for entry in entries(VENDORS).values())


def _folder(entry: "EntryPoint") -> Path:
    """Found without importing it: what a vendor's package imports is not ours to wait for."""
    from importlib.util import find_spec

    try:
        spec = find_spec(entry.module)
    except ImportError:
        spec = None
    if spec is None or not (spec.submodule_search_locations or spec.origin):
        raise UserError(
            f"distribution {_distribution(entry)}: entry point {VENDORS}: there is no module {entry.module!r}",
            "name a module or package of the distribution",
        )
    folder = (
        Path(spec.submodule_search_locations[0]) if spec.submodule_search_locations else Path(spec.origin or "").parent
    )
    if not (folder / "vendors.csv").is_file():
        raise UserError(
            f"distribution {_distribution(entry)}: {entry.module} has no vendors.csv", f"put the file into {folder}"
        )
    return folder


def _distribution(entry: "EntryPoint") -> str:
    return entry.dist.name if entry.dist is not None else entry.module

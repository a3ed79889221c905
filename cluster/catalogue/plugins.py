"""Installed distributions that add a vendor, discovered by their entry points on first use.

`polyfleet.vendors` names a module or package whose folder has vendors.csv and, optionally, models.csv,
architectures.csv, dtypes.csv and sources.csv. `polyfleet.discovery` names a module with `present` and `find`, and
`polyfleet.backends` the class of a back end.
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
    """Return the entry points of a group by name. Of two with one name, the first on the path is used."""
    from importlib.metadata import entry_points  # 20 ms, which most commands do not need

    by_name: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        by_name.setdefault(entry.name, entry)
    return by_name


@cache
def folders() -> tuple[tuple[Path, str], ...]:
    """Return (folder, distribution) of each entry of `polyfleet.vendors`.

    Raises UserError for one without vendors.csv.
    """
    return tuple((_folder(entry), _distribution(entry)) for entry in entries(VENDORS).values())


def _folder(entry: "EntryPoint") -> Path:
    """Return the folder of an entry's module, without importing it: a vendor's package may import slowly."""
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

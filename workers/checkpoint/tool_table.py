"""The table of checkpoint tools. The server reads it, too, so it imports nothing that needs torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto


class Limits(Enum):
    """Limits of the process that runs a tool."""

    NONE = auto()
    """It reads all bytes of checkpoints, however long that takes."""
    UNTRUSTED = auto()
    """It reads files of others: the limits of cluster/input/sandbox.py."""
    MANIFEST = auto()
    """It reads only manifests: also memory and time that the largest manifest needs."""
    MANIFEST_AND_BYTES = auto()
    """As MANIFEST, but it reads all bytes, too."""


@dataclass(frozen=True, slots=True)
class ToolLocation:
    """How a tool uses one of its locations.

    `is_written`: the tool writes it. `allows_stores`: it may be in an object store. `is_exact`: it means the folder
    itself, not the newest checkpoint in it.
    """

    is_written: bool = False
    allows_stores: bool = False
    is_exact: bool = False


@dataclass(frozen=True, slots=True)
class Tool:
    """`function` is MODULE:NAME in workers.checkpoint. `locations`: arguments that are locations when a node runs the
    tool for a client or a copy; a tool without any runs only on the machine of its caller.

    `has_progress`: it has a parameter `progress`. `follows_links`: it follows links when called as a function; in
    a child process it does so only for the user of this machine.
    """

    function: str
    locations: Mapping[str, ToolLocation] = field(default_factory=dict)
    has_progress: bool = False
    limits: Limits = Limits.NONE
    follows_links: bool = False

    @property
    def module(self) -> str:
        return f"workers.checkpoint.{self.function.partition(':')[0]}"


READ = ToolLocation()
READ_FOLDER = ToolLocation(is_exact=True)
READ_ANYWHERE = ToolLocation(allows_stores=True)
WRITTEN = ToolLocation(is_written=True)
WRITTEN_FOLDER = ToolLocation(is_written=True, is_exact=True)
WRITTEN_ANYWHERE = ToolLocation(is_written=True, allows_stores=True)

TOOLS = {
    "list": Tool("disk.inspect:list_checkpoints", limits=Limits.MANIFEST, follows_links=True),
    "show": Tool("disk.inspect:describe", limits=Limits.MANIFEST, follows_links=True),
    "check": Tool("disk.inspect:verify", has_progress=True, limits=Limits.MANIFEST_AND_BYTES, follows_links=True),
    "newest": Tool("disk.inspect:newest", limits=Limits.MANIFEST, follows_links=True),
    "plan": Tool("conversion.move_plan:plan", limits=Limits.MANIFEST, follows_links=True),
    "incoming": Tool("transfer.expected:expected", limits=Limits.MANIFEST),
    "missing": Tool("transfer.chunk_upload:missing", has_progress=True),
    "arrive": Tool("transfer.chunk_upload:arrive", has_progress=True),
    "verify": Tool("transfer.copier:verify_location", {"place": READ_ANYWHERE}, has_progress=True),
    "diff": Tool("loading.comparer:diff", {"a": READ, "b": READ}, has_progress=True, follows_links=True),
    "convert": Tool(
        "loading.converter:convert", {"source": READ, "root": WRITTEN}, has_progress=True, follows_links=True
    ),
    "prune": Tool("disk.pruner:prune", {"root": WRITTEN_FOLDER}),
    "pin": Tool("disk.pruner:pin_one", {"path": READ}),
    "discard": Tool("disk.pruner:discard", {"path": WRITTEN}),
    "copy": Tool(
        "transfer.copier:copy",
        {"source": READ_ANYWHERE, "target": WRITTEN_ANYWHERE},
        has_progress=True,
        follows_links=True,
    ),
    "import": Tool(
        "exchange.importer:import_here",
        {"source": READ_FOLDER, "root": WRITTEN},
        has_progress=True,
        limits=Limits.UNTRUSTED,
    ),
    "export": Tool(
        "exchange.exporter:export_checkpoint",
        {"source": READ, "target": WRITTEN},
        has_progress=True,
        follows_links=True,
    ),
    "look": Tool("transfer.data_download:look", {"source": READ_ANYWHERE}),
    "fetch": Tool("transfer.data_download:fetch", {"source": READ_ANYWHERE, "target": WRITTEN}, has_progress=True),
    "stored": Tool("transfer.stored_checkpoints:stored"),
    "retain": Tool("transfer.stored_retention:retain"),
    "pin_stored": Tool("transfer.stored_retention:pin_stored", {"path": WRITTEN_ANYWHERE}),
    "prune_stored": Tool("transfer.stored_retention:prune_stored", {"root": WRITTEN_ANYWHERE}, has_progress=True),
    "stage": Tool(
        "transfer.stored_checkpoints:stage", {"source": READ_ANYWHERE, "target": WRITTEN_FOLDER}, has_progress=True
    ),
    "stored_files": Tool("transfer.stored_files:stored_files"),
    "put_files": Tool("transfer.stored_files:put_files", has_progress=True),
    "fetch_files": Tool("transfer.stored_files:fetch_files", has_progress=True),
    "remove_stored_files": Tool("transfer.stored_files:remove_stored_files"),
    "keep": Tool("exchange.script_versions:keep", limits=Limits.UNTRUSTED),
    "hand_on": Tool("exchange.script_versions:hand_on", limits=Limits.UNTRUSTED),
}
NODE_TOOLS = tuple(name for name, tool in TOOLS.items() if tool.locations)
"""Tools that run on a node for a client or a copy."""

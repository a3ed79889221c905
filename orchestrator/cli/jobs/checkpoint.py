"""`polyfleet checkpoint …`: show, convert, copy and delete checkpoints, in pools and on this machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.errors import FleetError, UserError
from orchestrator.cli.terminal import completion_values
from orchestrator.cli.terminal.byte_progress import byte_progress
from orchestrator.cli.terminal.output import Format, Output, emit, print_message

if TYPE_CHECKING:
    from orchestrator.client.checkpoint_tools import CheckpointTools
    from orchestrator.client.client import Client
    from orchestrator.views.checkpoints import CheckpointSummary

app = typer.Typer(help="Checkpoints of pools, folders and object stores.", no_args_is_help=True, rich_markup_mode=None)
LOCATION_METAVAR = "POOL:PATH|JOB|PATH|URI"
LIST_METAVAR = "[JOB|POOL|POOL:PATH|PATH]"
Location = Annotated[
    str,
    typer.Argument(
        help="Checkpoint, or a folder of checkpoints: the newest is used",
        metavar=LOCATION_METAVAR,
        autocompletion=completion_values.jobs_and_pools,
    ),
]
Root = Annotated[
    str,
    typer.Argument(
        help="Folder that holds the step-… folders",
        metavar="POOL:PATH|JOB|PATH",
        autocompletion=completion_values.jobs_and_pools,
    ),
]
Key = Annotated[str, typer.Option("--key", help="Idempotency key: an operation with the same key runs once")]
REFUSED_EXIT_CODE, DIFFERENT_EXIT_CODE = 1, 1


@contextmanager
def _tools(label: str) -> Iterator["CheckpointTools"]:
    """Checkpoint tools that show their progress as `label`."""
    from orchestrator.client.checkpoint_tools import CheckpointTools
    from orchestrator.client.client import connect

    with byte_progress(label) as progress:
        yield CheckpointTools(lambda start=True: connect(start=start, progress=print_message), progress)


def _run(verb: str, locations: dict[str, str], label: str = "", key: str = "", **options: Any) -> Any:
    with _tools(label or verb) as tools:
        return tools.run(verb, locations, _without_none(options), key)


def _without_none(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


@app.command("list")
def list_(
    prefix: Annotated[
        str,
        typer.Argument(
            help="Job, pool, POOL:PATH or local folder to list (default: all)",
            metavar=LIST_METAVAR,
            autocompletion=completion_values.jobs_and_pools,
        ),
    ] = "",
    pool: Annotated[
        str, typer.Option(help="Pool whose checkpoints are listed", autocompletion=completion_values.pool)
    ] = "",
    output: Output = Format.TABLE,
) -> None:
    """List the checkpoints of one pool, of all pools, or of a local folder (a path that begins with a slash or dot)."""
    from orchestrator.client.client import connect
    from orchestrator.show.checkpoints import checkpoints

    if prefix.startswith(("/", "./", "../", "~")) or prefix in (".", ".."):
        with _tools("list") as tools:
            rows = tools.run_locally("list", {"root": prefix})
    else:
        of_pool, colon, path = prefix.partition(":")
        of_pool, path = (of_pool, path) if colon else ("", prefix)
        if of_pool and pool not in ("", of_pool):
            raise UserError(f"{prefix} is not in pool {pool!r}", "leave out --pool")
        with connect(progress=print_message) as client:
            rows = _list_checkpoints(client, of_pool or pool, path)
    emit(rows, output, lambda rows: checkpoints(rows, prefix))


def _list_checkpoints(client: "Client", pool: str, path: str) -> "list[CheckpointSummary]":
    """List checkpoints below a path or of a job; if there are none and a pool has that name, all of that pool."""
    rows = client.checkpoints.list(pool=pool, prefix=path)
    if not (rows or pool) and any(path == one["pool"] for one in client.fleet.show()["pools"]):
        pool, path, rows = path, "", client.checkpoints.list(pool=path)
    away = client.checkpoints.away(pool=pool)
    if away and not rows:
        raise FleetError("; ".join(away), "`polyfleet up` brings back a node that is down")
    for sentence in away:
        print_message(sentence)
    return rows


@app.command()
def show(ref: Location, output: Output = Format.TABLE) -> None:
    """Show what a checkpoint contains: producer, step, tensors, bytes."""
    from orchestrator.show.checkpoints import describe_table

    with _tools("show") as tools:
        summary = tools.show(ref)
    emit(summary, output, describe_table)


@app.command()
def verify(ref: Location, output: Output = Format.TABLE) -> None:
    """Read every byte and compare it with the manifest's hashes. Exit code 2 if one differs."""
    from orchestrator.show.checkpoints import verified

    result = _run("verify", {"place": ref}, f"verifying {ref}")
    emit(result, output, verified)
    if not result["ok"]:
        raise typer.Exit(UserError.exit_code)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", autocompletion=completion_values.jobs_and_pools)],
    b: Annotated[str, typer.Argument(metavar="B", autocompletion=completion_values.jobs_and_pools)],
    output: Output = Format.TABLE,
) -> None:
    """Compare two checkpoints tensor by tensor: how many values differ, and by how many units in the last place. Exit
    code 1 if any differs.
    """
    from orchestrator.show.checkpoints import differences

    result = _run("diff", {"a": a, "b": b}, "comparing")
    emit(result, output, differences)
    if not result["same"]:
        raise typer.Exit(DIFFERENT_EXIT_CODE)


@app.command()
def plan(
    ref: Location,
    to: Annotated[
        str, typer.Option("--to", help="Device kind to move to, e.g. tpu:v5e", autocompletion=completion_values.kind)
    ],
    count: Annotated[int, typer.Option(help="Number of devices of that kind", min=1)] = 1,
    output: Output = Format.TABLE,
) -> None:
    """Print what a move to another device kind would keep, convert or refuse, and whether it fits. Exit code 1 if it
    cannot be moved.
    """
    from orchestrator.show.checkpoints import planned

    with _tools("plan") as tools:
        result = tools.plan(ref, to, count)
    emit(result, output, planned)
    if not result["ok"]:
        raise typer.Exit(REFUSED_EXIT_CODE)


@app.command()
def convert(
    source: Location,
    target: Annotated[
        str,
        typer.Argument(
            help="Folder to write into", metavar="POOL:FOLDER|FOLDER", autocompletion=completion_values.pool_prefixes
        ),
    ],
    to_kind: Annotated[
        str,
        typer.Option(
            help="Device kind whose dtypes the result has, e.g. tpu:v5e", autocompletion=completion_values.kind
        ),
    ] = "",
    dtype: Annotated[
        list[str] | None, typer.Option(help="Dtype conversion, FROM=TO or NAME*=TO for tensors; repeatable")
    ] = None,
    on_lossy: Annotated[
        str, typer.Option(help="Action if a conversion would change values: `error` or `allow`")
    ] = "error",
    key: Key = "",
    output: Output = Format.TABLE,
) -> None:
    """Write a copy in other dtypes, and print which values changed."""
    from orchestrator.show.checkpoints import conversion

    if not to_kind and not dtype:
        raise UserError("the target of the conversion is missing", "add --to-kind or --dtype")
    options = {"to_kind": to_kind or None, "dtype": _parse_dtypes(dtype or []) or None, "on_lossy": on_lossy}
    result = _run("convert", {"source": source, "root": target}, f"converting {source}", key, **options)
    emit(result, output, conversion)


def _parse_dtypes(pairs: list[str]) -> dict[str, str]:
    split = (pair.partition("=") for pair in pairs)
    mapping = {source: target for source, _, target in split}
    if bad := [key for key, value in mapping.items() if not key or not value]:
        raise UserError(f"--dtype {bad[0]!r} is not a pair FROM=TO", "write FROM=TO, such as float32=bfloat16")
    return mapping


@app.command()
def copy(
    source: Location,
    target: Annotated[
        str,
        typer.Argument(
            help="Folder to copy into", metavar="POOL:FOLDER|FOLDER|URI", autocompletion=completion_values.pool_prefixes
        ),
    ],
    to_kind: Annotated[
        str,
        typer.Option(
            help="Device kind for which the copy is converted, e.g. tpu:v5e", autocompletion=completion_values.kind
        ),
    ] = "",
    convert_at: Annotated[str, typer.Option(help="Pool whose node converts: `source` or `target`")] = "source",
    on_lossy: Annotated[
        str, typer.Option(help="Action if a conversion would change values: `error` or `allow`")
    ] = "error",
    key: Key = "",
    output: Output = Format.TABLE,
) -> None:
    """Copy a checkpoint between pools, this machine and object stores, and verify it there. Only missing chunks are
    sent: run it again after an interruption, and it resumes.
    """
    from orchestrator.show.checkpoints import copied

    options = {"to_kind": to_kind, "convert_at": convert_at, "on_lossy": on_lossy}
    with _tools(f"copying {source}") as tools:
        result = tools.copy(source, target, options, key)
    emit(result, output, copied)


@app.command()
def prune(
    root: Root,
    keep: Annotated[int, typer.Option(help="Number of newest undamaged checkpoints to keep", min=1)],
    dry_run: Annotated[bool, typer.Option(help="Print what would be deleted, without deleting it")] = False,
    key: Key = "",
    output: Output = Format.TABLE,
) -> None:
    """Delete older checkpoints. Pinned checkpoints, and damaged ones newer than the newest undamaged, remain."""
    from orchestrator.show.checkpoints import pruned

    emit(_run("prune", {"root": root}, key=key, keep=keep, dry_run=dry_run), output, pruned)


@app.command()
def pin(
    ref: Location,
    remove: Annotated[bool, typer.Option(help="Remove the pin instead of setting it")] = False,
    key: Key = "",
    output: Output = Format.TABLE,
) -> None:
    """Protect a checkpoint: neither `keep` nor `prune` deletes it."""
    from orchestrator.show.checkpoints import pinned

    emit(_run("pin", {"path": ref}, key=key, remove=remove), output, pinned)


@app.command("import")
def import_(
    source: Annotated[
        str,
        typer.Argument(
            help="File or folder of another format",
            metavar="POOL:PATH|PATH",
            autocompletion=completion_values.pool_prefixes,
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            help="Folder of checkpoints to import into (default: beside the source)",
            autocompletion=completion_values.pool_prefixes,
        ),
    ] = "",
    format: Annotated[  # noqa: A002
        str, typer.Option(help="Source format: safetensors, torch, dcp, accelerate, trainer (default: detected)")
    ] = "",
    step: Annotated[
        int | None, typer.Option(help="Training step of the checkpoint (default: read from the source)", min=0)
    ] = None,
    skip_unsupported: Annotated[
        bool, typer.Option(help="Skip objects that cannot be imported, and invalid optimizer states")
    ] = False,
    key: Key = "",
    output: Output = Format.TABLE,
) -> None:
    """Import safetensors, a torch.save file, or a folder of DCP, Accelerate or the Trainer as a checkpoint. No code in
    it is run. Each part of a folder is imported, or listed with the reason why it is left out.
    """
    from orchestrator.show.checkpoints import imported

    options = _without_none({"format": format or None, "step": step, "drop": skip_unsupported or None})
    with _tools(f"importing {source}") as tools:
        result = tools.import_(source, target, options, key)
    emit(result, output, imported)


@app.command()
def export(
    source: Location,
    target: Annotated[
        str,
        typer.Argument(
            help="New file or folder to write", metavar="POOL:PATH|PATH", autocompletion=completion_values.pool_prefixes
        ),
    ],
    format: Annotated[  # noqa: A002
        str, typer.Option(help="Target format: safetensors, torch, dcp, accelerate or trainer")
    ] = "safetensors",
    entry: Annotated[str, typer.Option(help="Module to export if the checkpoint has several")] = "",
    key: Key = "",
    output: Output = Format.TABLE,
) -> None:
    """Write a checkpoint in the format of another tool. An imported one is restored as it was if the format is the
    same.
    """
    from orchestrator.show.checkpoints import exported

    locations = {"source": source, "target": target}
    emit(_run("export", locations, f"exporting {source}", key, format=format, entry=entry or None), output, exported)

"""`polyfleet files …`: list, fetch and add files in a job's $POLYFLEET_OUTPUT_DIR."""

from typing import Annotated, Any

import typer

from orchestrator.cli.terminal import completion_values
from orchestrator.cli.terminal.byte_progress import byte_progress
from orchestrator.cli.terminal.output import Format, Output, emit, print_message

app = typer.Typer(help="Files of jobs: $POLYFLEET_OUTPUT_DIR.", no_args_is_help=True, rich_markup_mode=None)
Where = Annotated[
    str,
    typer.Argument(
        help="Job, or a path in its output folder",
        metavar="JOB[:PATH]",
        show_default=False,
        autocompletion=completion_values.jobs,
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite files that differ")]


@app.command("ls")
def list_(where: Where, output: Output = Format.TABLE) -> None:
    """List the files and folders below JOB[:PATH], with sizes and times (UTC)."""
    from orchestrator.client.client import connect
    from orchestrator.client.file_transfer import list_all_files
    from orchestrator.show.jobs import files

    with connect(progress=print_message) as client:
        emit(list_all_files(client, *_split(where)), output, files)


@app.command()
def get(
    where: Where,
    dest: Annotated[
        str,
        typer.Argument(
            help="Local file or folder to write; folder contents are written into it", show_default="its own name"
        ),
    ] = "",
    force: Force = False,
    output: Output = Format.TABLE,
) -> None:
    """Fetch a file, or a folder with its contents. Files that are already on this machine are not fetched again: run it
    again after an interruption, and it resumes. Local files that differ are only overwritten with --force.
    """
    from orchestrator.client import file_download
    from orchestrator.client.client import connect

    with connect(progress=print_message) as client, byte_progress(f"getting {where}") as progress:
        transfer = file_download.get(client, *_split(where), dest, force, progress)
    _emit(transfer.to_plain(), output)


@app.command()
def put(
    source: Annotated[str, typer.Argument(help="Local file or folder to send", metavar="SOURCE")],
    where: Where,
    force: Force = False,
    output: Output = Format.TABLE,
) -> None:
    """Add a file or a folder to a job's output folder. Files of a running job are never overwritten, others that differ
    only with --force.
    """
    from orchestrator.client import file_upload
    from orchestrator.client.client import connect

    with connect(progress=print_message) as client, byte_progress(f"putting {source}") as progress:
        transfer = file_upload.put(client, source, *_split(where), force, progress)
    _emit(transfer.to_plain(), output)


def _split(text: str) -> tuple[str, str]:
    """Split JOB:PATH; a job's name never contains a colon."""
    job, _, path = text.partition(":")
    return job, path


def _emit(transfer: dict[str, Any], output: Format) -> None:
    from orchestrator.show.jobs import transferred

    emit(transfer, output, transferred)

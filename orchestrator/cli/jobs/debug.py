"""`polyfleet debug …`: how the server came to what it did."""

import typer

from orchestrator.cli.terminal.output import Format, JobArgument, Output, emit, print_message

app = typer.Typer(help="How the server came to what it did.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def debug() -> None:
    """How the server came to what it did."""


@app.command()
def story(ref: JobArgument, output: Output = Format.TABLE) -> None:
    """Print the events of a job, then each message after which the server changed its attempts or sent commands.

    The server has the newest 10,000 lines about all jobs in memory. Times are UTC.
    """
    from orchestrator.client.client import connect
    from orchestrator.show.jobs import story as show_story

    with connect(progress=print_message) as client:
        emit(client.story(ref), output, show_story)

"""`polyfleet debug …`: what the server did, and why."""

import typer

from orchestrator.cli.terminal.output import Format, JobArgument, Output, emit, print_message

app = typer.Typer(help="Show what the server did, and why.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def debug() -> None:
    """Show what the server did, and why."""


@app.command()
def story(ref: JobArgument, output: Output = Format.TABLE) -> None:
    """Print the events of a job, then each message after which the server changed its attempts or sent commands.

    A line has the number, time and text of a message, then the changes of states and the commands that followed from
    it. `tick` is the message of the clock, JOB.2 the second attempt of a job, and a part an attempt on one node;
    docs/reference/states.md explains the states. The server has the newest 10,000 lines, for all jobs, in memory. Times
    are UTC.
    """
    from orchestrator.client.client import connect
    from orchestrator.show.jobs import story as show_story

    with connect(progress=print_message) as client:
        emit(client.story(ref), output, show_story)

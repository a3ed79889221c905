"""The Typer application with all commands, and the only module where an error becomes an exit code."""

import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from cluster.version import VERSION
from orchestrator.cli import completion, env, render, schema
from orchestrator.cli.fleet import fleet, hosts, node, server, top
from orchestrator.cli.jobs import checkpoint, execs, files, jobs, logs, offer, run, submit
from orchestrator.cli.measurement import benchmark, kernels, simulate, validate
from orchestrator.cli.terminal.errors import EXIT_CODES, print_error
from orchestrator.cli.terminal.help_pages import InGroups, show_examples

NAME = "polyfleet"
_CODES = "  ".join(f"{code} {meaning.partition(';')[0]}." for code, meaning in EXIT_CODES.items())

app = typer.Typer(
    name=NAME,
    cls=InGroups,
    help="One orchestrator for mixed accelerator fleets: submit, compare and move training across vendors.",
    epilog=f"Exit codes: {_CODES}",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
VERBS: tuple[Callable[..., None], ...] = (
    *(fleet.up, fleet.down, fleet.status, fleet.inventory, fleet.backends, fleet.doctor, top.top),
    *(submit.submit, run.run, offer.offer),
    *(jobs.jobs, jobs.show, logs.logs, jobs.cancel, jobs.migrate, jobs.rename, jobs.explain),
    *(execs.exec_, execs.shell),
    *(validate.validate, render.render, simulate.simulate, schema.schema, completion.completion),
)
COMMAND_VERBS = (submit.submit, run.run, offer.offer, execs.exec_)
for verb in VERBS:
    app.command(verb.__name__.rstrip("_"), cls=submit.WithCommand if verb in COMMAND_VERBS else None)(verb)
app.add_typer(benchmark.app, name="benchmark")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(files.app, name="files")
app.add_typer(node.app, name="node")
app.add_typer(hosts.app, name="hosts")
app.add_typer(env.app, name="env")
app.add_typer(kernels.app, name="kernels")
app.add_typer(server.app, name="server")
app.add_typer(jobs.debug_app, name="debug")
show_examples(app)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"{NAME} {VERSION}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command that `sys.argv` names."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115, PTH123 - None where the caller closed it
    # httpx also imports its own command with rich and pygments if they are installed: 0.05 s for each command.
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        if not completion.complete_shell(app):
            app(prog_name=NAME)
    except (Exception, KeyboardInterrupt) as e:
        sys.exit(print_error(e))

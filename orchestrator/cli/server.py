"""`polyfleet server …`: the server's own life. Other verbs start it when they need it."""

from typing import Annotated, Any

import typer

from orchestrator.cli.output import Format, Output, emit, say, waiting

app = typer.Typer(help="Start, stop and look at the server.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def start(
    port: Annotated[
        int | None,
        typer.Option(
            help="Listen on this loopback port too; 0: any free one. By default only a Unix socket.", min=0, max=65535
        ),
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Start the server, unless it runs."""
    from cluster.paths import home
    from orchestrator.server import daemon

    running = daemon.find(home())
    if running is None:
        with waiting("starting the server"):
            running = daemon.start(home(), port)
    elif port is not None and port != running.port and not (port == 0 and running.port):
        from cluster.errors import Conflict

        where = f"on port {running.port}" if running.port else "without a TCP port"
        raise Conflict(f"the server runs already, {where}", "`polyfleet server stop` first")
    _show(output)


@app.command()
def stop() -> None:
    """Stop the server. The fleet and running jobs go on; the next server takes them up again."""
    from cluster.paths import home
    from orchestrator.server import daemon

    with waiting("stopping the server"):
        stopped = daemon.stop_server(home())
    say("server stopped" if stopped else "no server was running")


@app.command()
def status(output: Output = Format.TABLE) -> None:
    """Whether the server runs, where and since when. Does not start it."""
    _show(output)


def state() -> dict[str, Any]:
    """What is known of the server without talking to it."""
    from cluster.paths import home
    from orchestrator.server import daemon

    found = daemon.find(home())
    answer: dict[str, Any] = {"running": found is not None, "home": str(home()), "log": str(daemon.log_path(home()))}
    if found is not None:
        where = {"socket": found.socket, "url": found.url}
        answer |= {name: value for name, value in where.items() if value}
        answer |= {"pid": found.pid, "version": found.version, "started_at": found.started_at}
    return answer


def _show(output: Format) -> None:
    from orchestrator.show.grid import facts

    emit(state(), output, facts)

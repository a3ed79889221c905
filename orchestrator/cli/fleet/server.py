"""`polyfleet server …`: start, stop and inspect the server. Other commands start it if they need it."""

from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli.terminal.errors import FAILED
from orchestrator.cli.terminal.output import Format, Output, emit, print_message, progress_line

app = typer.Typer(help="Start, stop and inspect the server.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def start(
    port: Annotated[
        int | None,
        typer.Option(
            help="TCP port on 127.0.0.1 beside the Unix socket (0: any free port; default: none)", min=0, max=65535
        ),
    ] = None,
    database_url: Annotated[
        str,
        typer.Option(help="Job database from now on: postgresql://USER@HOST/DATABASE, without a password"),
    ] = "",
    output: Output = Format.TABLE,
) -> None:
    """Start the server, unless it runs."""
    from cluster.paths import home
    from orchestrator.home import daemon

    running = daemon.find_server(home())
    if database_url:
        _choose_database(database_url, running is not None)
    if running is None:
        with progress_line("starting the server"):
            running = daemon.start_server(home(), port)
    elif port is not None and port != running.port and not (port == 0 and running.port):
        from cluster.errors import Conflict

        where = f"on port {running.port}" if running.port else "without a TCP port"
        raise Conflict(f"the server is already running, {where}", "run `polyfleet server stop` first")
    _show(output)


@app.command()
def stop() -> None:
    """Stop the server. The fleet and running jobs keep running; the next server reconnects to them."""
    from cluster.paths import home
    from orchestrator.home import daemon

    with progress_line("stopping the server"):
        stopped = daemon.stop_server(home())
    print_message("server stopped" if stopped else "no server was running")


@app.command()
def status(output: Output = Format.TABLE) -> None:
    """Show whether the server runs, its address and its start time. Does not start it."""
    _show(output)


@app.command()
def backup(
    file: Annotated[
        Path | None, typer.Argument(help="New file to write (default: one in the folder `backups` of the home)")
    ] = None,
) -> None:
    """Write all jobs and their history to one file, while the server runs or not."""
    from cluster.paths import home, private_dir
    from orchestrator.store.database.backup import backup as write
    from orchestrator.store.database.database_file_copy import stamp
    from orchestrator.store.database.sqlite import BACKUPS
    from orchestrator.store.events.database_setting import database_url

    url = database_url(home())
    target = file or private_dir(home() / BACKUPS) / f"polyfleet-{stamp()}.db"
    with progress_line("copying the job store"):
        size_bytes = write(url, target.absolute())
    print_message(f"wrote {target} ({size_bytes / 2**20:.1f} MiB)")


@app.command()
def restore(
    file: Annotated[Path, typer.Argument(help="Backup written by `server backup` or by an upgrade")],
    force: Annotated[
        bool, typer.Option("--force", help="Restore even if FILE is a backup of a different job store")
    ] = False,
) -> None:
    """Replace the job store by a backup and keep the old one under another name. Stop the server first."""
    from cluster.paths import home, private_dir
    from orchestrator.store.database.restore import restore as put
    from orchestrator.store.events.database_setting import database_url

    private_dir(home())
    with progress_line("restoring the job store"):
        previous = put(database_url(home()), file.absolute(), force)
    print_message(f"restored {file}" + (f"; the previous job store is now {previous}" if previous else ""))


@app.command()
def verify(
    file: Annotated[Path | None, typer.Argument(help="Backup to check (default: the job store itself)")] = None,
    output: Output = Format.TABLE,
) -> None:
    """Read all of the job store, or of a backup, and list what is damaged. Exit code 1 if anything is."""
    from dataclasses import asdict

    from cluster.paths import home
    from orchestrator.show.table import facts
    from orchestrator.store.database.database import sqlite_url
    from orchestrator.store.events.database_setting import database_url
    from orchestrator.store.events.verify import verify as read

    url = sqlite_url(file) if file else database_url(home())
    with progress_line("reading the job store"):
        checked = read(url)
    summary = asdict(checked)
    if output is Format.TABLE:
        rows = ", ".join(f"{count} {table}" for table, count in checked.rows.items() if count) or "none"
        summary = {"database": checked.database, "version": checked.version, "rows": rows}
        summary |= {"sound": "no" if checked.findings else "yes"}
    emit(summary, output, facts)
    for finding in checked.findings if output is Format.TABLE else ():
        print_message(f"error: {finding}")
    if checked.more_findings:
        print_message(f"and {checked.more_findings} more")
    if checked.findings:
        print_message(f"  {checked.remedy}")
        raise typer.Exit(FAILED)


def _choose_database(url: str, is_running: bool) -> None:
    """Set the database of the server that is about to be started, through its environment variable."""
    import os

    from cluster.errors import Conflict
    from cluster.paths import home
    from orchestrator.store.database.database import name_of, parse_url
    from orchestrator.store.events import database_setting

    requested, current = (
        name_of(parse_url(u)) for u in (database_setting.strip_password(url), database_setting.database_url(home()))
    )
    if requested == current:
        return  # the setting already names this database, possibly with a password
    if is_running:
        raise Conflict(
            f"the server is already running, with its jobs in {current}", "run `polyfleet server stop` first"
        )
    os.environ[database_setting.VARIABLE] = url


def state() -> dict[str, Any]:
    """State of the server, without connecting to it."""
    from cluster.paths import home
    from orchestrator.home import daemon
    from orchestrator.store.events.database_setting import name_of_database

    record = daemon.find_server(home())
    view: dict[str, Any] = {"running": record is not None, "home": str(home()), "log": str(daemon.log_path(home()))}
    view["database"] = name_of_database(home())
    if record is not None:
        where = {"socket": record.socket, "url": record.url}
        view |= {name: value for name, value in where.items() if value}
        view |= {"pid": record.pid, "version": record.version, "started_at": record.started_at}
    return view


def _show(output: Format) -> None:
    from orchestrator.show.table import facts

    emit(state(), output, facts)

"""What each case is, in words; which are compared; and the tables."""

from collections.abc import Iterable
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from orchestrator.units import duration, size

TEXTS = ("theirs", "process", "limit", "")
STAGES = (
    ("accepted", "request → accepted, on its way to disk"),
    ("placed", "accepted → planned (the event before is on disk)"),
    ("command_ran", "planned → the command's first output"),
    ("finished", "first output → its end is known to the server"),
    ("told", "end known → on disk, and the client told"),
)
CASES = (
    ("cli.help", "`polyfleet --help`"),
    ("cli.jobs", "`polyfleet jobs`"),
    ("cli.submit", "`polyfleet submit --wait` of a no-op"),
    ("ray_cli.help", "`ray --help`"),
    ("ray_cli.list", "`ray job list`"),
    ("ray_cli.submit", "`ray job submit` of a no-op"),
    ("job.warm.acknowledged", "no-op job: submit → acknowledged, durable"),
    ("job.warm.running", "no-op job: submit → its command runs"),
    ("job.warm.done", "no-op job: submit → done"),
    ("job.back_to_back", "no-op job right after another: submit → done"),
    ("job.queued", "no-op jobs submitted at once: per job"),
    ("job.python", "no-op job from Python: `o.submit(…).wait()`"),
    ("actor.warm", "bare Ray actor: start, run the command"),
    ("ray_job.warm.acknowledged", "Ray job SDK: submit → acknowledged"),
    ("ray_job.warm.done", "Ray job SDK: submit → SUCCEEDED"),
    ("job.cold.done", "first no-op job after up: submit → done"),
    ("actor.cold", "first bare actor after up: start, run the command"),
    ("ray_job.cold.done", "first Ray job after its head is up: submit → SUCCEEDED"),
    ("actor.join", "driver: `import ray`, `ray.init`"),
    ("fleet.up", "`polyfleet up`: head, one node, server, agent ready"),
    ("fleet.down", "`polyfleet down`"),
    ("ray_head.up", "`ray start --head` until its job API answers"),
    ("ray_pair.up", "the same, then one more node (`ray start --address`) started"),
    ("ray_head.down", "the same head stopped"),
    ("inventory.rest", "inventory: `GET /v1/nodes`"),
    ("inventory.python", "inventory: `o.inventory()`"),
    ("inventory.discovery", "whole discovery, all vendors, in this process"),
    ("inventory.agent", "whole discovery by the node's agent, through Ray"),
    ("limit.exec", "fork + exec of `true`, until collected"),
    ("limit.python", "`python -c pass`"),
    ("limit.fsync", "write of 4 KiB + fsync"),
    ("limit.event", "one event durable in our store"),
    ("limit.http", "`GET /healthz`, new connection"),
    ("limit.call", "one call of a living Ray actor"),
    *((f"job.warm.stage.{name}", what) for name, what in STAGES),
    *((f"job.cold.stage.{name}", f"first job: {what}") for name, what in STAGES),
)
PEERS = (
    ("job.warm.done", "actor.warm"),
    ("job.back_to_back", "actor.warm"),
    ("job.warm.done", "ray_job.warm.done"),
    ("job.python", "ray_job.warm.done"),
    ("job.warm.acknowledged", "ray_job.warm.acknowledged"),
    ("cli.submit", "ray_cli.submit"),
    ("job.cold.done", "actor.cold"),
    ("job.cold.done", "ray_job.cold.done"),
    ("cli.jobs", "ray_cli.list"),
    ("cli.help", "ray_cli.help"),
    ("fleet.up", "ray_head.up"),
    ("fleet.up", "ray_pair.up"),
    ("fleet.down", "ray_head.down"),
)
LIMITS = (
    ("cli.help", "limit.python"),
    ("cli.jobs", "limit.python"),
    ("job.warm.done", "limit.python"),
    ("job.warm.acknowledged", "limit.event"),
    ("limit.event", "limit.fsync"),
    ("inventory.rest", "limit.http"),
    ("inventory.agent", "limit.call"),
)


def show(found: dict[str, Any], console: Console) -> None:
    rows = {row["case"]: row for row in found["rows"]}
    stages = [row for case, row in rows.items() if ".stage." in case]
    console.print(_seconds("Seconds", (row for row in rows.values() if row not in stages)))
    console.print(_seconds("Where a no-op job's time goes", stages))
    console.print(_ratios(found["ratios"], rows))
    console.print(_limits(found["over_limits"], rows))
    console.print(_memory(found["memory"], found["memory_totals"]))
    load = found["load_average"]
    console.print(f"{found['machine']['cores']} cores, {found['machine']['cpu']}; load before {load['before']}, "
                  f"after {load['after']}; events per job {sorted(set(found['durable_events_per_job']))}")  # fmt: skip


def _seconds(title: str, rows: Iterable[dict[str, Any]]) -> Table:
    table = _table(title, "what", "median", "95 % interval", "min", "n")
    for row in rows:
        interval = f"{duration(row['low_s'])} – {duration(row['high_s'])}" if row["n"] > 1 else ""
        table.add_row(row["what"], duration(row["median_s"]), interval, duration(row["min_s"]), str(row["n"]))
    return table


def _ratios(ratios: list[dict[str, Any]], rows: dict[str, Any]) -> Table:
    table = _table("Ratios: their time over ours", "ours", "theirs", "ratio", "interval", "")
    for r in ratios:
        interval = f"{r['low']:.2g} – {r['high']:.2g}"
        table.add_row(rows[r["ours"]]["what"], rows[r["theirs"]]["what"], f"{r['ratio']:.2g}", interval, r["verdict"])
    return table


def _limits(over: list[dict[str, Any]], rows: dict[str, Any]) -> Table:
    table = _table("How far from what the machine allows", "ours", "limit", "times")
    for o in over:
        table.add_row(rows[o["ours"]]["what"], rows[o["limit"]]["what"], f"{o['times']:.2g}")
    return table


def _memory(rows: list[dict[str, Any]], totals: list[dict[str, Any]]) -> Table:
    table = _table("Memory, and load while idle", "group", "process", "n", "RSS", "PSS", "of one core")
    for row in (*rows, *totals):
        what = row.get("role", "all")
        share = f"{row['cpu_share']:.1%}"
        table.add_row(row["group"], what, str(row["n"]), size(row["rss_bytes"]), size(row["pss_bytes"]), share)
    return table


def _table(title: str, *columns: str) -> Table:
    """Its lines are Markdown."""
    table = Table(title=title, title_justify="left", box=MARKDOWN, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < 1 or column in TEXTS else "right")
    return table

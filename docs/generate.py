"""Write docs/reference/ and orchestrator/client/verbs/ from the code's own metadata; with --check, fail when what is
there is stale.

    python docs/generate.py [--check] [--into FOLDER]

cli.md from Typer, rest.md from FastAPI's OpenAPI, actions.md from the declared verbs, python.md from the methods of
Orchestrator (python_calls.py), states.md and failures.md from the tables of states and of kinds of failure, metrics.md
from the table of metrics, spec.md from the JSON Schemas, config.md from PolyfleetConfig. The client's modules are from
the declared verbs, too: client_modules.py.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

import client_modules
import python_calls
import typer.main
from pydantic_core import PydanticUndefined

import workers.options.config
from cluster.catalogue.device_metrics import DEVICE_METRICS, DeviceMetric
from orchestrator.cli.main import NAME, app
from orchestrator.cli.terminal.errors import EXIT_CODES
from orchestrator.cli.terminal.examples import EXAMPLES
from orchestrator.core.attempt.attempt_states import ATTEMPT, ATTEMPT_MEANING, PART, PART_MEANING, STOP, STOP_MEANING
from orchestrator.core.states import EVENTS, MEANING, MOVES, State
from orchestrator.server.app import make_app
from orchestrator.services.service import Service
from orchestrator.spec.job_spec import get_schema
from orchestrator.units import size
from orchestrator.verbs.declare import JSON_BODY, Verb, all_verbs
from workers.options.config import PolyfleetConfig
from workers.protocol.failure_kinds import FAILURE_KINDS, REACTIONS, FailureKind

REFERENCE = Path(__file__).parent / "reference"
MADE = "<!-- Written by docs/generate.py from the code: change the code, then run it again. -->"
Data = dict[str, Any]


def table(columns: tuple[str, ...], rows: Iterable[Iterable[object]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        cells = (" ".join(str(cell).split()).replace("|", r"\|") for cell in row)
        yield f"| {' | '.join(cells)} |"
    yield ""


def cli() -> Iterator[str]:
    yield from ("# Command line", "", MADE, "")
    yield from (
        "Every reading verb takes `-o table|json|yaml`; stdout carries the answer alone, messages go to stderr.",
        "",
    )
    yield from ("## Exit codes", "", *table(("code", "means"), EXIT_CODES.items()))
    yield from verb(typer.main.get_command(app), NAME)


def verb(command: Any, name: str) -> Iterator[str]:
    """A command, then its own commands."""
    inner = getattr(command, "commands", {})
    if name != NAME:
        arguments = [written(p) for p in command.params if p.param_type_name == "argument"]
        words = ["COMMAND"] if inner else [f"[{a}]" if " | " in a else a for a in arguments]
        yield from (f"## `{' '.join([name, *words])}`", "", command.help or "", "")
    options = [row for p in command.params if (row := parameter(p))]
    if options and name != NAME:
        yield from table(("", "", "default"), options)
    if examples := EXAMPLES.get(name.partition(" ")[2]):
        yield from ("```console", *(f"$ {example}" for example in examples), "```", "")
    for key in inner:
        yield from verb(inner[key], f"{name} {key}")


def written(argument: Any) -> str:
    word = str(argument.metavar or argument.name.upper())
    return word if argument.nargs != -1 or "..." in word else f"{word}..."


def parameter(p: Any) -> tuple[str, str, str] | None:
    if p.name == "help":
        return None
    if p.param_type_name == "argument":
        return f"`{p.metavar or p.name.upper()}`", p.help or "", ""
    names = ", ".join(f"`{o}`" for o in (*p.opts, *p.secondary_opts))
    default = getattr(p.default, "value", p.default)
    shown = "" if default in (None, "", False, True, 0, ()) or callable(default) else f"`{default}`"
    return names, p.help or "", shown


def rest() -> Iterator[str]:
    document = make_app(cast(Service, None), "").openapi()
    yield from ("# REST", "", MADE, "")
    yield from (
        "On the Unix socket `server.sock` in the home (`http://localhost/…` there), and on a loopback port if the "
        "server was started with `polyfleet server start --port N`. "
        "Every request but `GET /healthz` needs `Authorization: Bearer TOKEN`, the home's file `token`; "
        "requests that change something need `Content-Type: application/json`, or for binary bodies "
        "`application/octet-stream`, for code archives `application/zip`. "
        "The OpenAPI document is at `/openapi.json`, which needs the token, too. [Actions](actions.md) has all routes "
        "in one table.",
        "",
        "```console",
        "$ curl --silent --unix-socket ~/.polyfleet/server.sock "
        '--header "Authorization: Bearer $(cat ~/.polyfleet/token)" http://localhost/v1/jobs',
        "```",
        "",
        'An error has the body `{"error": {"type", "message", "remedy", "field"?}}` and one of these statuses.',
        "",
    )
    codes = (
        (401, "no token, or a wrong one: the server makes a new one at each start, unless you wrote the file"),
        (404, "no such job, checkpoint, code archive or path"),
        (409, "the present state does not allow it, or the same idempotency key was used with another body"),
        (
            413,
            "body over 1 MiB (pieces of files 8 MiB, bulk submissions 16 MiB, manifests 256 MiB, archives 512 MiB)",
        ),
        (415, "another content type than the one above"),
        (421, "a Host other than 127.0.0.1 and localhost (on a port: with this port)"),
        (422, "a field is wrong; `field` names it"),
        (429, "too many concurrent requests or waiting jobs; `Retry-After` says when to send the request again"),
        (
            503,
            "the fleet, the job store or the controller cannot serve now, or 512 streams are open; with `Retry-After`",
        ),
    )
    yield from table(("status", "means"), codes)
    yield from (
        "Connections: the head of a request has at most 64 KiB and must be complete within 10 s; its body must not "
        "pause for 30 s or be slower than 1 KiB/s. At most 256 connections without the token are open; one more closes "
        "the oldest. Whole numbers are within 64 bits.",
        "",
        "Another user's process may listen on a port. Before you send the token to one, send "
        "`GET /healthz?challenge=HEX` with random digits and compare `proof`, as the Python client does. The socket "
        "needs no such check if its folder is yours and has mode 0700.",
        "",
    )
    for title, operation in all_operations(document):
        yield from route(document, title, operation)
    yield from views(document)


def route(document: Data, title: str, operation: Data) -> Iterator[str]:
    yield from (f"## `{title}`", "", operation.get("description", ""), "")
    body = body_of(document, operation)
    fields = [(p["name"], p["in"], p["required"], p["schema"] | p) for p in operation.get("parameters", [])]
    fields += [(n, "body", n in body["required"], field) for n, field in body["properties"].items()]
    rows = [
        (
            f"`{name}`",
            where,
            linked_type(field) if where == "body" else type_of(field),
            "required" if is_required else default_of(field),
            field.get("description", ""),
        )
        for name, where, is_required, field in fields
    ]
    if rows:
        yield from table(("name", "in", "type", "default", ""), rows)
    yield from responses(operation)


def body_of(document: Data, operation: Data) -> Data:
    """Properties of the JSON body of a request, and the names of those that are required."""
    for content in operation.get("requestBody", {}).get("content", {}).values():
        body = document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
        return {"properties": body["properties"], "required": body.get("required", [])}
    return {"properties": {}, "required": []}


def responses(operation: Data) -> Iterator[str]:
    """The type of the response, or of the data of each event."""
    status, response = next(iter(operation["responses"].items()))
    for content in response.get("content", {}).values():
        if events := content.get("itemSchema", {}).get("oneOf"):
            parts = [event["properties"] for event in events]
            rows = [(f"`{part['event']['const']}`", linked_type(part["data"]["contentSchema"])) for part in parts]
            yield from table(("event", "data"), rows)
        else:
            yield from (f"Response ({status}): {linked_type(content['schema'])}", "")


def views(document: Data) -> Iterator[str]:
    """Every type that is part of a request or of a response."""
    schemas = document["components"]["schemas"]
    yield from ("## Types", "", "A key marked with ? may be absent.", "")
    parts = [[operation["responses"], body_of(document, operation)] for _, operation in all_operations(document)]
    for name in sorted(referenced(parts, schemas)):
        schema = schemas[name]
        yield from (f"### {name}", "", schema.get("description", ""), "")
        required = schema.get("required", [])
        rows = (
            (f"`{key}`" if key in required else f"`{key}` ?", linked_type(field), field.get("description", ""))
            for key, field in schema["properties"].items()
        )
        yield from table(("key", "type", ""), rows) if schema["properties"] else ()


def all_operations(document: Data) -> Iterator[tuple[str, Data]]:
    for path, operations in document["paths"].items():
        yield from ((f"{method.upper()} {path}", operation) for method, operation in operations.items())


def referenced(part: Any, schemas: Data) -> set[str]:
    """Names of the schemas that a part of the document refers to, directly or through others."""
    names: set[str] = set()
    waiting = [part]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            name = str(value.get("$ref", "")).rpartition("/")[2]
            if name and name not in names:
                names.add(name)
                waiting.append(schemas[name])
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return names


def linked_type(schema: Data) -> str:
    """Like `type_of`, with null, and with links to the types of this page."""
    if "$ref" in schema:
        name = type_of(schema)
        return f"[{name}](#{name.lower()})"
    if schema.get("type") == "null":
        return "null"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(linked_type, schema["anyOf"])))
    if schema.get("type") == "array":
        items = linked_type(schema.get("items", {}))
        return f"list of ({items})" if " or " in items else f"list of {items}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"mapping to {linked_type(schema['additionalProperties'])}"
    if schema.get("format") == "binary":
        return "bytes"
    return type_of(schema)


def actions() -> Iterator[str]:
    yield from ("# Actions of the server", "", MADE, "")
    yield from (
        "Each action with its route ([REST](rest.md)), the lowest role that may call it, and whether it takes an "
        "idempotency key: a repeated request with the same key and body counts once.",
        "",
        f"A request that changes something has a body of one content type, by default `{JSON_BODY.content_type}`, and "
        f"of at most {size(JSON_BODY.limit_bytes)}; the column *body* has exceptions. A request that may stay "
        "*open* is not counted as a request in progress, but has a separate limit. A path without an action is "
        "refused with 404, a path without an action for the request's method with 405.",
        "",
        "A `viewer` reads. A `member` also submits and changes jobs, and what belongs to them. An `admin` also changes "
        "nodes and stops the server. Today every token has the role `admin`: no request is refused for its role.",
        "",
    )
    yield from table(("action", "method", "path", "role", "key", "body", "open"), map(action, all_verbs()))


def action(declared: Verb) -> tuple[str, ...]:
    role = "none, needs no token" if declared.least is None else f"`{declared.least.name.lower()}`"
    body = declared.body
    return (
        f"`{declared.action}`",
        declared.method,
        f"`{declared.path}`",
        role,
        "yes" if declared.takes_key else "",
        "" if body == JSON_BODY else f"`{body.content_type}`, {size(body.limit_bytes)}",
        "yes" if declared.may_stay_open else "",
    )


def python() -> Iterator[str]:
    yield from ("# Python", "", MADE, "")
    yield from (
        "`o` is an `Orchestrator`, `job` the handle that `o.jobs.submit` and `o.jobs.get` return: "
        "[guide](../guides/python.md). A row has the command, the method and the route that do the same; some methods "
        "send several requests. Slow methods also take `progress`, a function that is called with how far they are.",
        "",
        "`o.submit`, `o.job` and `o.inventory` are short for `o.jobs.submit`, `o.jobs.get` and `o.nodes.list`.",
        "",
    )
    yield from table(("command", "Python", "REST"), map(python_call, python_calls.calls()))
    words = ", ".join(f"`{words}`" for words in python_calls.commands_without_call())
    yield f"On the command line only: {words}."


def python_call(call: python_calls.PythonCall) -> tuple[str, ...]:
    route = call.verb and f"`{call.verb.method} {call.verb.path}`"
    return call.words and f"`{call.words}`", f"`{call.text}`", route or ""


def states() -> Iterator[str]:
    yield from ("# States of a job", "", MADE, "")
    yield from table(("state", "means"), ((f"`{s}`", MEANING[s]) for s in State))
    yield from ("What is not in this table cannot happen.", "")
    rows = ((f"`{s}`", *(f"`{MOVES[s, e]}`" if (s, e) in MOVES else "" for e in EVENTS)) for s in State)
    yield from table(("from / on", *EVENTS), rows)
    yield from attempts()


def attempts() -> Iterator[str]:
    """The tables of an attempt, of its part on one node, and of the request to a node to stop it."""
    part_rows = {row: (after, "") for row, after in PART.items()}
    for title, meaning, rows in (
        ("An attempt", ATTEMPT_MEANING, ATTEMPT),
        ("The part of an attempt on one node", PART_MEANING, part_rows),
        ("The request to a node to stop its part", STOP_MEANING, STOP),
    ):
        yield from (f"## {title}", "")
        yield from table(("state", "means"), ((f"`{s}`", meaning[s]) for s in meaning))
        lines = (
            (s, event, after, command) for s in meaning for (of, event), (after, command) in rows.items() if of is s
        )
        yield from table(("from", "on", "to", "command"), ((f"`{s}`", e, f"`{after}`", c) for s, e, after, c in lines))


def failures() -> Iterator[str]:
    yield from ("# Kinds of failure", "", MADE, "")
    yield from (
        "`polyfleet show JOB` prints the kind of a failure before its message, e.g. `(oom, exit code -9)`. A job may "
        "change what a kind counts as: [`recovery.on_events`](../guides/jobs.md#recovery).",
        "",
    )
    columns = ("kind", "cause", "counts as", "next candidate", "what to do")
    yield from table(columns, (failure(name, kind) for name, kind in FAILURE_KINDS.items()))
    decisive, independent = (
        ", ".join(f"`{name}`" for name, kind in FAILURE_KINDS.items() if kind.cause_rank == rank) for rank in (1, 2)
    )
    yield (
        f"If several nodes of an attempt failed, {decisive} decides; else the first failure of a kind that no other "
        f"rank causes ({independent}); else the first failure."
    )


def failure(name: str, kind: FailureKind) -> tuple[str, ...]:
    more = f" ([more](../guides/{kind.guide}))" if kind.guide else ""
    return f"`{name}`", f"{kind.meaning}{more}", *REACTIONS[kind.reaction], kind.remedy


def metrics() -> Iterator[str]:
    yield from ("# Metrics of devices", "", MADE, "")
    yield from (
        "Drivers report these without the device being opened. `polyfleet top` shows those that have a column, by name "
        "with `-o json`; on NVIDIA, benchmarks record theirs around each measurement.",
        "",
    )
    columns = ("name", "unit", "means", "column", "in benchmarks", "NVIDIA (NVML)", "AMD (sysfs)")
    yield from table(columns, map(metric, DEVICE_METRICS))


def metric(row: DeviceMetric) -> tuple[str, ...]:
    sources = (row.nvidia and row.nvidia.function, row.amd and row.amd.path)
    recorded = "yes" if row.in_benchmarks else ""
    return f"`{row.name}`", row.unit, row.meaning, row.heading, recorded, *(f"`{s}`" if s else "" for s in sources)


def spec() -> Iterator[str]:
    yield from ("# Job and fleet files", "", MADE, "")
    yield from ("`polyfleet schema job` and `polyfleet schema fleet` print these as JSON Schema.", "")
    for kind in ("job", "fleet"):
        schema = get_schema(kind)
        yield from (f"## {kind.capitalize()} file", "", schema.get("description", ""), "", *properties(schema))
        for name, part in schema.get("$defs", {}).items():
            described = (
                part if "properties" in part else next((p for p in part.get("anyOf", []) if "properties" in p), None)
            )
            if described:
                yield from (f"### {name}", "", described.get("description", ""), "", *properties(described))


def configuration() -> Iterator[str]:
    places = [line[4:] for line in (workers.options.config.__doc__ or "").splitlines()[2:5]]
    yield from ("# Configuration", "", MADE, "", "```", *places, "```", "")
    yield from (
        "Arguments win over the environment, that over the file. Options take effect while their back end is entered "
        "(`with get_backend(...)`), and are set back after. A wrong name or value is an error, wherever it is written. "
        "In a variable a list is `nvidia,cpu` or JSON, and a whole section is a JSON object. Functions that take a "
        "`config` take a dict of the same options, too.",
        "",
    )
    fields = PolyfleetConfig.model_fields
    sections = {n: f.annotation for n, f in fields.items() if hasattr(f.annotation, "model_fields")}
    rest_of = {n: f for n, f in fields.items() if n not in sections}
    yield from ("## General", "", *table(("option", "default", ""), map(option, rest_of.items())))
    for name, model in sections.items():
        yield from (f"## {name}", "", *table(("option", "default", ""), map(option, model.model_fields.items())))


def option(item: tuple[str, Any]) -> tuple[str, str, str]:
    name, field = item
    default = "" if field.default in (None, (), PydanticUndefined) else f"`{field.default}`".replace("'", "")
    values = ", ".join(f"`{v}`" for part in (field.annotation, *get_args(field.annotation)) for v in words(part))
    return f"`{name}`", default, field.description + (f": {values}" if values else "")


def words(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def properties(schema: Data) -> Iterator[str]:
    required = schema.get("required", [])
    rows = (
        (
            f"`{name}`",
            type_of(field),
            "required" if name in required else default_of(field),
            description_of(field),
        )
        for name, field in schema["properties"].items()
    )
    yield from table(("key", "type", "default", ""), rows)


def description_of(field: Data) -> str:
    """Of a field that may be left out the description stands beside its type."""
    described = (one["description"] for one in (field, *field.get("anyOf", ())) if "description" in one)
    return next(described, "")


def default_of(field: Data) -> str:
    value = field.get("default")
    return "" if value in (None, "", {}, []) else f"`{json.dumps(value)}`"


def type_of(schema: Data) -> str:
    """A JSON Schema's type in words."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]) if value != "")
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(type_of(part) for part in schema["anyOf"] if part.get("type") != "null"))
    if schema.get("type") == "array":
        return f"list of {type_of(schema.get('items', {}))}".removesuffix(" of any")
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"mapping to {type_of(schema['additionalProperties'])}"
    words = {"object": "mapping", "string": "text", "integer": "whole number", "boolean": "true or false"}
    return words.get(schema.get("type", "any"), schema.get("type", "any"))


PAGES = {
    "cli.md": cli,
    "config.md": configuration,
    "rest.md": rest,
    "actions.md": actions,
    "python.md": python,
    "states.md": states,
    "failures.md": failures,
    "metrics.md": metrics,
    "spec.md": spec,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is stale")
    parser.add_argument("--into", type=Path, help="write the pages into this folder, and no module")
    given = parser.parse_args()
    texts = {(given.into or REFERENCE) / name: "\n".join(page()).rstrip() + "\n" for name, page in PAGES.items()}
    if given.into is None:
        texts |= {client_modules.CLIENT / name: text for name, text in client_modules.modules().items()}
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    for path in stale if not given.check else ():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts[path])
    if stale:
        what = "stale; run python docs/generate.py" if given.check else "written"
        sys.stderr.write(f"{', '.join(path.name for path in stale)}: {what}\n")
    return 1 if stale and given.check else 0


if __name__ == "__main__":
    sys.exit(main())

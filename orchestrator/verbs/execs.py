"""Commands beside the ranks of a running job: `polyfleet exec` and `polyfleet shell`."""

import base64
import binascii
from functools import partial
from typing import Annotated

from pydantic import AfterValidator

from cluster.errors import SpecError
from orchestrator.runtime.jobs.exec_relay import ExecRequest
from orchestrator.server.http.exec_streams import follow_command
from orchestrator.server.http.hub import Hub
from orchestrator.services.service import Service
from orchestrator.verbs.declare import Arg, Events, Role, verb
from orchestrator.verbs.jobs import Ref
from orchestrator.views.logs import EmptyView, ExecEvents, ExecInputView, ExecStarted

MAX_COMMAND_BYTES = 32 << 10


def _check_arguments(arguments: list[str]) -> list[str]:
    """Check the arguments of a command. Raises ValueError."""
    if any("\0" in argument for argument in arguments):
        raise ValueError("an argument contains a NUL byte")
    if arguments and not arguments[0]:
        raise ValueError("the program's name is empty")
    if sum(len(argument.encode()) + 1 for argument in arguments) > MAX_COMMAND_BYTES:
        raise ValueError(f"longer than {MAX_COMMAND_BYTES} bytes")
    return arguments


Command = Annotated[
    list[str],
    AfterValidator(_check_arguments),
    Arg("a program and its arguments, at most 32 KiB (empty: a shell)", max_length=4096),
]
Size = Annotated[int, Arg(min=1, max=10_000)]
Rank = Annotated[int, Arg("rank beside which the command runs")]
Terminal = Annotated[bool, Arg("run it in a terminal of `rows` and `columns`")]
TakesInput = Annotated[bool, Arg("it has standard input, sent with `/input`", alias="input")]
Term = Annotated[str, Arg("TERM of the terminal", pattern="^[A-Za-z0-9._+-]{0,64}$")]
By = Annotated[str, Arg("name of the user for the server's log; not checked", max_length=200)]
ExecId = Annotated[str, Arg(pattern="^[0-9a-f]{32}$")]
Base64 = Annotated[str, Arg("base64", max_length=900_000)]
Offset = Annotated[int, Arg("bytes of input before `data`; bytes that were already accepted are skipped")]
IsEnd = Annotated[bool, Arg("this is the end of the input")]


@verb("POST /v1/jobs/{ref}/exec", least=Role.MEMBER)
async def start(
    hub: Hub,
    ref: Ref,
    command: Command,
    rank: Rank = 0,
    terminal: Terminal = False,
    takes_input: TakesInput = False,
    rows: Size = 24,
    columns: Size = 80,
    term: Term = "",
    by: By = "",
) -> Events[ExecEvents]:
    """Run a command beside a rank of a running job, in its folder, with its variables. Server-sent events: `started`,
    `output` as it arrives, then `end`. The command is stopped when the attempt or this connection ends.
    """
    request = ExecRequest(
        command=tuple(command), rank=rank, terminal=terminal, takes_input=takes_input, rows=rows, columns=columns,
        term=term, by=by,
    )  # fmt: skip
    started = await hub.execs.call(_start, hub.service, ref, request)
    return Events(follow_command(hub.execs, started), partial(hub.service.exec_relay.close, started["exec"]))


@verb("POST /v1/execs/{exec_id}/input", least=Role.MEMBER, idempotent=True)
async def write(hub: Hub, exec_id: ExecId, data: Base64, offset: Offset, end: IsEnd = False) -> ExecInputView:
    """Send input to the command. The response has the number of bytes accepted so far; send the others again."""
    try:
        content = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise SpecError("data", "is not base64", "encode the bytes as in RFC 4648") from None
    return await hub.execs.call(hub.service.exec_relay.write, exec_id, offset, content, end)


@verb("POST /v1/execs/{exec_id}/size", least=Role.MEMBER, idempotent=True)
async def resize(hub: Hub, exec_id: ExecId, rows: Size = 24, columns: Size = 80) -> EmptyView:
    """Set the size of the command's terminal."""
    await hub.execs.call(hub.service.exec_relay.resize, exec_id, rows, columns)
    return {}


@verb("POST /v1/execs/{exec_id}/end", least=Role.MEMBER, idempotent=True)
async def end(hub: Hub, exec_id: ExecId) -> EmptyView:
    """Stop the command: SIGHUP, and SIGKILL 2 s later. A command that has ended is not changed."""
    await hub.execs.call(hub.service.exec_relay.close, exec_id)
    return {}


def _start(service: Service, ref: str, request: ExecRequest) -> ExecStarted:
    return service.exec_relay.start(service.find_run_job(ref), request)

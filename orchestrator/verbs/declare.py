"""How a verb is declared: `@verb("POST /v1/nodes/{node}/drain")` above a function with typed parameters.

The function is the contract. Its module and name are the action (`nodes.drain`), its parameters are those of the
request, its return type is the view of the response, and its docstring and `Arg` are the text of the reference.
"""

import inspect
import pkgutil
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin, get_type_hints

IDEMPOTENT_METHODS = frozenset({"GET", "HEAD", "PUT", "DELETE"})
JSON = "application/json"
BINARY = "application/octet-stream"
URL_METHODS = IDEMPOTENT_METHODS
"""Methods whose parameters are all in the URL."""
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Progress = Callable[[int, int], None]
"""Callback of a long operation, with the bytes done and the total. It raises FleetError once no client listens."""


@dataclass(frozen=True, slots=True)
class Arg:
    """Text and bounds of a parameter. Numbers are finite, at least `min`, and within 64 bits. Bounds of the length are
    those of a string or a list. `alias` is the name in the request. `in_query`: a parameter of the URL, also of a
    method that has a JSON body. `is_json`: the text is a JSON object; clients in Python pass a mapping.
    """

    text: str = ""
    min: float = 0
    max: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    pattern: str | None = None
    alias: str = ""
    in_query: bool = False
    is_json: bool = False


class _KeyMark:
    pass


Key = Annotated[str, _KeyMark]
"""The idempotency key of the request, or "". A verb with this parameter itself responds to repeated requests."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Where the request came in: `port` is None on the Unix socket."""

    port: int | None


@dataclass(frozen=True, slots=True)
class Upload:
    """The binary body of the request as it arrives. A small one is a parameter of type `bytes` instead."""

    chunks: AsyncIterator[bytes]


@dataclass(frozen=True, slots=True)
class Download:
    """A binary response. `headers` are added to it."""

    content: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a list; `before` is the parameter of that name for the next page, None if this is the last."""

    rows: list[T]
    before: int | None


@dataclass(frozen=True, slots=True)
class Events(Generic[T]):
    """A stream of events: pairs of a name and data, or None for "nothing yet". `T` is the view of the events. `after`
    is called in a thread when the stream has ended for any reason, or could not begin.
    """

    source: AsyncIterator[tuple[str, Any] | None]
    after: Callable[[], None] | None = None


class Role(IntEnum):
    """What a caller may do; each role includes those below it. Today every token has the role ADMIN."""

    VIEWER = 1
    """Read."""
    MEMBER = 2
    """Submit and change jobs, and what belongs to them."""
    ADMIN = 3
    """Change nodes, and stop the server."""


class Exchange(Enum):
    """How a verb's request and response travel."""

    PLAIN = auto()
    """JSON in both directions."""
    PAGE = auto()
    """A list whose `Link` header names the next page."""
    STREAM = auto()
    """Server-sent events."""
    OPERATION = auto()
    """A long operation: events `progress`, then `result` or `error`."""
    UPLOAD = auto()
    """The request has a binary body."""
    DOWNLOAD = auto()
    """The response has a binary body."""


@dataclass(frozen=True, slots=True)
class RequestBody:
    """What the guard accepts as the body of a request."""

    content_type: str = JSON
    limit_bytes: int = 1 << 20


JSON_BODY = RequestBody()
PIECE_BODY = RequestBody(BINARY, (8 << 20) + 1024)
"""One piece of a file or of a checkpoint, which has at most 8 MiB."""


@dataclass(frozen=True)
class Verb:
    """A declared verb.

    `least` is the lowest role that may call it; None: also without a token. `slow`: it may take minutes, so it runs in
    separate threads and delays no other request. `waits`: it waits for events without holding a thread. `resume`: the
    client continues a stream that breaks off, until its event `end`: for each parameter the key of the last event's
    data that it is then, or "" to leave it out.
    """

    function: Callable[..., Any]
    method: str
    path: str
    least: Role | None
    status: int
    idempotent: bool
    slow: bool
    waits: bool
    declared_body: RequestBody | None
    resume: Mapping[str, str] | None

    @property
    def noun(self) -> str:
        return self.function.__module__.rpartition(".")[2]

    @property
    def name(self) -> str:
        """The function's name; `list_` is the name `list`, which Python uses itself."""
        return self.function.__name__.removesuffix("_")

    @property
    def action(self) -> str:
        return f"{self.noun}.{self.name}"

    @property
    def summary(self) -> str:
        """First sentence of the docstring."""
        paragraph = " ".join((inspect.getdoc(self.function) or "").partition("\n\n")[0].split())
        return paragraph.partition(". ")[0].removesuffix(".")

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    @cached_property
    def hints(self) -> dict[str, Any]:
        """Types of the parameters, without the first, which is the Hub."""
        _hub, *parameters = inspect.signature(self.function).parameters
        hints = get_type_hints(self.function, include_extras=True)
        return {name: hints[name] for name in parameters}

    @cached_property
    def result(self) -> Any:
        """Type of the response; of a page that of its rows, of a stream that of its events."""
        hint = get_type_hints(self.function)["return"]
        return get_args(hint)[0] if get_origin(hint) in (Page, Events) else hint

    @cached_property
    def exchange(self) -> Exchange:
        returned = get_type_hints(self.function)["return"]
        if self.parameters_of(Progress):
            return Exchange.OPERATION
        if self.parameters_of(bytes) or self.parameters_of(Upload):
            return Exchange.UPLOAD
        exchanges = {Page: Exchange.PAGE, Events: Exchange.STREAM, Download: Exchange.DOWNLOAD}
        return exchanges.get(get_origin(returned) or returned, Exchange.PLAIN)

    @cached_property
    def body(self) -> RequestBody:
        """The declared one, else a piece of an upload or JSON."""
        return self.declared_body or (PIECE_BODY if self.exchange is Exchange.UPLOAD else JSON_BODY)

    @cached_property
    def may_stay_open(self) -> bool:
        """Whether a request may be open for long without holding one of the threads that all requests share. Such
        requests have separate limits. An upload is not one of them: its body is in memory.
        """
        if self.exchange is Exchange.UPLOAD:
            return False
        return self.slow or self.waits or self.least is None or self.exchange in (Exchange.STREAM, Exchange.OPERATION)

    @cached_property
    def request_names(self) -> list[str]:
        """Names of the parameters that the request has."""
        return [name for name, hint in self.hints.items() if hint not in INJECTED]

    def is_in_url(self, name: str) -> bool:
        return self.method in URL_METHODS or name in self.path_names or arg_of(self.hints[name]).in_query

    def default(self, name: str) -> Any:
        """Default of a parameter; inspect.Parameter.empty if it is required."""
        return inspect.signature(self.function).parameters[name].default

    def parameters_of(self, hint: Any) -> list[str]:
        """Names of the parameters of exactly this type."""
        return [name for name, own in self.hints.items() if own == hint]

    @cached_property
    def path_names(self) -> list[str]:
        return re.findall(r"{(\w+)}", self.path)

    @cached_property
    def has_own_key(self) -> bool:
        """Whether the verb itself responds to repeated requests."""
        return bool(self.parameters_of(Key))

    @cached_property
    def takes_key(self) -> bool:
        """Whether a repeated request with the same idempotency key counts once."""
        return (not self.idempotent and self.exchange in (Exchange.PLAIN, Exchange.OPERATION)) or self.has_own_key


INJECTED = (Progress, Key, Caller, Upload, bytes)
"""Types of parameters that are not parameters of the request."""
_VERBS: dict[Callable[..., Any], Verb] = {}


def arg_of(hint: Any) -> Arg:
    """Text and bounds in the type of a parameter."""
    return next((part for part in get_args(hint) if isinstance(part, Arg)), Arg())


def verb(
    route: str,
    *,
    least: Role | None,
    status: int = 200,
    idempotent: bool | None = None,
    slow: bool = False,
    waits: bool = False,
    body: RequestBody | None = None,
    resume: Mapping[str, str] | None = None,
) -> Callable[[F], F]:
    """Declare a verb. `route` is a method and a path such as "GET /v1/jobs/{ref}".

    `least`: the lowest role that may call it; None: also without a token. `idempotent`: a repeated request needs no
    key; by default true of GET, HEAD, PUT and DELETE, and to be written at a POST that only reads. `body`: content type
    and limit if they are not those of its exchange. For `slow`, `waits` and `resume` see Verb.
    """
    method, _, path = route.partition(" ")
    is_idempotent = method in IDEMPOTENT_METHODS if idempotent is None else idempotent

    def declare(function: F) -> F:
        _VERBS[function] = Verb(function, method, path, least, status, is_idempotent, slow, waits, body, resume)
        return function

    return declare


def verbs_of(module: ModuleType) -> Iterator[Verb]:
    """Verbs that a module declares, in its order."""
    functions = (value for value in vars(module).values() if inspect.isfunction(value))
    return (_VERBS[function] for function in functions if function in _VERBS and function.__module__ == module.__name__)


def verb_of(function: Callable[..., Any]) -> Verb:
    """The declared verb. Raises KeyError."""
    return _VERBS[function]


def all_verbs() -> list[Verb]:
    """Verbs of all modules of this folder, by module."""
    names = sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    modules = (import_module(f"{__package__}.{name}") for name in names)
    return [declared for module in modules for declared in verbs_of(module)]

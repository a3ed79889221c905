"""Turns declared verbs into routes: parameters, request body, idempotency key, response, OpenAPI operation."""

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from types import ModuleType
from typing import Annotated, Any, get_args, get_origin

import anyio.to_thread
from fastapi import APIRouter, Header, Path, Query, Request, Response
from pydantic import BaseModel, Field, create_model
from pydantic_core import to_jsonable_python
from typing_extensions import TypedDict

from orchestrator.server.http.hub import Hub
from orchestrator.server.http.operations import stream_operation
from orchestrator.server.http.request_bodies import MAX_INTEGER, Body
from orchestrator.server.http.response_views import ResponseView, set_view
from orchestrator.server.http.responses import json_response
from orchestrator.server.http.streams import StreamLimitExceeded, events
from orchestrator.verbs.declare import (
    BINARY,
    Arg,
    Caller,
    Download,
    Events,
    Exchange,
    Key,
    Page,
    Progress,
    Upload,
    Verb,
    arg_of,
    verbs_of,
)
from orchestrator.views.values import ProgressEvent, StreamErrorView

IDEMPOTENCY_KEY = Annotated[
    str, Header(max_length=200, description="a repeated request with the same key and body counts once")
]
Arguments = dict[str, Any]
Call = Callable[[], Awaitable[Any]]


def make_router(module: ModuleType) -> APIRouter:
    """Make the routes of all verbs of a module, in its order."""
    router = APIRouter()
    for verb in verbs_of(module):
        add_verb(router, verb)
    return router


def add_verb(router: APIRouter, verb: Verb) -> None:
    """Add the route of one verb. Raises TypeError if its declaration contradicts itself."""
    if problem := _problem(verb):
        raise TypeError(f"verb {verb.action}: {problem}")
    endpoint = _make_endpoint(verb)
    set_view(endpoint, _response_view(verb))
    router.add_api_route(
        verb.path,
        endpoint,
        methods=[verb.method],
        status_code=verb.status,
        operation_id=verb.action,
        name=verb.action,
        summary=verb.summary,
        tags=[verb.noun],
    )


def _problem(verb: Verb) -> str:
    missing = [name for name in verb.path_names if name not in verb.hints]
    if missing:
        return f"its path has {{{missing[0]}}}, but it has no such parameter"
    if verb.is_async and verb.exchange is Exchange.OPERATION:
        return "a long operation runs in a thread: make it a plain function"
    if verb.is_async and verb.exchange is Exchange.PLAIN and verb.takes_key and not verb.parameters_of(Key):
        return "a verb that changes something is a plain function, has a parameter `key: Key`, or is idempotent"
    return ""


def _response_view(verb: Verb) -> ResponseView:
    if verb.exchange is Exchange.STREAM:
        return ResponseView(verb.result, is_stream=True)
    if verb.exchange is Exchange.OPERATION:
        return ResponseView(_operation_events(verb), is_stream=True)
    if verb.exchange is Exchange.DOWNLOAD:
        return ResponseView(bytes)
    if verb.exchange is Exchange.PAGE:
        return ResponseView(list.__class_getitem__(verb.result))
    return ResponseView(None if verb.result is type(None) else verb.result)


def _operation_events(verb: Verb) -> Any:
    fields = {"error": StreamErrorView, "progress": ProgressEvent, "result": verb.result}
    return TypedDict("OperationEvents", fields, total=False)  # type: ignore[operator]


# -- parameters


def _make_endpoint(verb: Verb) -> Callable[..., Awaitable[Response]]:
    """The function that FastAPI calls. Its signature is that of the request."""
    in_body = [name for name in verb.request_names if not verb.is_in_url(name)]
    parameters: list[tuple[str, Any, Any]] = [("request", Request, inspect.Parameter.empty)]
    parameters += [_url_parameter(verb, name) for name in verb.request_names if name not in in_body]
    if in_body:
        parameters.append(("body", _body_model(verb, in_body), inspect.Parameter.empty))
    if verb.takes_key:
        parameters.append(("idempotency_key", IDEMPOTENCY_KEY, ""))

    async def endpoint(
        request: Request, body: BaseModel | None = None, idempotency_key: str = "", **arguments: Any
    ) -> Response:
        arguments |= {name: getattr(body, name) for name in in_body}
        return await _Invocation(verb, request, arguments, idempotency_key).respond()

    endpoint.__doc__, endpoint.__name__ = verb.function.__doc__, verb.action
    endpoint.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=default)
            for name, hint, default in parameters
        ],
        return_annotation=Response,
    )
    return endpoint


def _url_parameter(verb: Verb, name: str) -> tuple[str, Any, Any]:
    kind, hint = Path if name in verb.path_names else Query, verb.hints[name]
    return name, _annotated(hint, kind(**_constraints(hint))), verb.default(name)


def _body_model(verb: Verb, names: list[str]) -> type[BaseModel]:
    """The model of a JSON body, named after the action."""
    fields: dict[str, Any] = {}
    for name in names:
        hint, default = verb.hints[name], verb.default(name)
        value = ... if default is inspect.Parameter.empty else default
        fields[name] = (_annotated(hint, Field(**_constraints(hint))), value)
    name = "".join(part.capitalize() for part in verb.action.replace(".", "_").split("_"))
    return create_model(name, __base__=Body, **fields)


def _annotated(hint: Any, info: Any) -> Any:
    """`hint` with `info` instead of its Arg."""
    if get_origin(hint) is not Annotated:
        return Annotated[hint, info]
    base, *parts = get_args(hint)
    return Annotated.__class_getitem__((base, *(part for part in parts if not isinstance(part, Arg)), info))


def _constraints(hint: Any) -> dict[str, Any]:
    """Arguments of FastAPI's or pydantic's description of a parameter."""
    arg = arg_of(hint)
    base = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    types = get_args(base) or (base,)
    constraints: dict[str, Any] = {"description": arg.text or None, "alias": arg.alias or None, "pattern": arg.pattern}
    constraints |= {"min_length": arg.min_length, "max_length": arg.max_length}
    if int in types:
        constraints |= {"ge": arg.min, "le": MAX_INTEGER if arg.max is None else arg.max}
    if float in types:
        constraints |= {"ge": arg.min, "le": arg.max, "allow_inf_nan": False}
    return {name: value for name, value in constraints.items() if value is not None}


# -- responses


class _Invocation:
    """One request for a verb."""

    def __init__(self, verb: Verb, request: Request, arguments: Arguments, key: str):
        self._verb, self._request, self._key = verb, request, key
        self._hub: Hub = request.app.state.hub
        self._arguments = arguments
        self._exchanges: dict[Exchange, Call] = {
            Exchange.PAGE: self._page,
            Exchange.STREAM: self._stream,
            Exchange.OPERATION: self._operation,
            Exchange.DOWNLOAD: self._download,
        }

    async def respond(self) -> Response:
        response: Response = await self._exchanges.get(self._verb.exchange, self._json)()
        return response

    async def _json(self) -> Response:
        result = await self._call()
        status = self._verb.status
        return Response(status_code=status) if self._verb.result is type(None) else json_response(result, status)

    async def _page(self) -> Response:
        page: Page[Any] = await self._call()
        response = json_response(page.rows, self._verb.status)
        if page.before is not None:
            older = self._request.url.include_query_params(before=page.before)
            response.headers["Link"] = f'<{older.path}?{older.query}>; rel="next"'
        return response

    async def _stream(self) -> Response:
        stream: Events[Any] = await self._call()
        try:
            return events(self._request, stream.source, stream.after)
        except StreamLimitExceeded:
            if stream.after is not None:
                await anyio.to_thread.run_sync(stream.after)
            raise

    async def _operation(self) -> Response:
        (progress_name,) = self._verb.parameters_of(Progress)
        arguments = self._all_arguments(await self._read_body())

        def run(progress: Progress) -> Any:
            return self._verb.function(self._hub, **arguments, **{progress_name: progress})

        return events(self._request, stream_operation(self._hub.operations, self._key, self._identity(), run))

    async def _download(self) -> Response:
        download: Download = await self._call()
        return Response(bytes(download.content), self._verb.status, dict(download.headers), BINARY)

    async def _call(self) -> Any:
        """Call the verb: itself if it is a coroutine, else in a thread, and once for each key."""
        call = partial(self._verb.function, self._hub, **self._all_arguments(await self._read_body()))
        if self._verb.is_async:
            return await call()
        if self._key and self._verb.takes_key and not self._verb.parameters_of(Key):
            call = partial(self._hub.service.once, self._key, self._identity(), call)
        if self._verb.slow:
            return await self._hub.streams.call_slow(call)
        return await anyio.to_thread.run_sync(call)

    async def _read_body(self) -> bytes:
        return await self._request.body() if self._verb.parameters_of(bytes) else b""

    def _all_arguments(self, body: bytes) -> Arguments:
        """The arguments, with those that are not in the request; a callback of progress is added later."""
        values: dict[Any, Any] = {
            Key: self._key,
            Caller: Caller(self._request.scope["server"][1]),
            Upload: Upload(self._request.stream()),
            bytes: body,
        }
        injected = {name: value for hint, value in values.items() for name in self._verb.parameters_of(hint)}
        return self._arguments | injected

    def _identity(self) -> list[Any]:
        """What two requests with the same key have in common: the action and its arguments."""
        return [self._verb.action, to_jsonable_python(self._arguments)]

"""Views of responses: each route names the type of its response, and the OpenAPI document describes it.

FastAPI gets no response model, because responses leave as they are: it would validate and encode each one again.
Schemas are made when the document is first requested.
"""

import ast
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, get_type_hints

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from typing_extensions import get_original_bases, is_typeddict

from orchestrator.views.values import ErrorBodyView

REF = "#/components/schemas/{model}"
VALIDATION_SCHEMAS = ("HTTPValidationError", "ValidationError")
"""Error schemas of FastAPI, which no response has."""
ERROR = ("", "error")
Data = dict[str, Any]
Key = tuple[str, str]
"""Id of a route, and the name of an event or ""."""


@dataclass(frozen=True, slots=True)
class ResponseView:
    """`view` is the type of the body: of JSON, `bytes` for binary data, None for no body. Of a stream it has the names
    of its events as keys, and the types of their data.
    """

    view: Any
    is_stream: bool = False


_VIEWS: dict[Callable[..., Any], ResponseView] = {}


def set_view(endpoint: Callable[..., Any], view: ResponseView) -> None:
    """Name the view of a route, by the function that responds to it."""
    _VIEWS[endpoint] = view


def view_of(endpoint: Callable[..., Any]) -> ResponseView:
    """The view that a route has named. Raises KeyError."""
    return _VIEWS[endpoint]


def routes_of(routers: Iterable[APIRouter]) -> Iterator[APIRoute]:
    return (route for router in routers for route in router.routes if isinstance(route, APIRoute))


def add_responses(document: Data, routers: Iterable[APIRouter]) -> None:
    """Describe the responses of all routes in an OpenAPI document. A route must have named its view."""
    routes = list(routes_of(routers))
    types = {key: view for route in routes for key, view in _json_types(route).items()} | {ERROR: ErrorBodyView}
    inputs = [(key, "validation", TypeAdapter(view)) for key, view in types.items()]
    schemas, definitions = TypeAdapter.json_schemas(inputs, ref_template=REF)  # type: ignore[arg-type]
    components = document["components"]["schemas"]
    for name in VALIDATION_SCHEMAS:
        components.pop(name, None)
    components |= definitions["$defs"]
    _describe_fields(components, types.values())
    by_key = {key: schema for (key, _), schema in schemas.items()}
    error = {"description": "Error", "content": {"application/json": {"schema": by_key[ERROR]}}}
    for route in routes:
        content = _content(route, by_key)
        success = {"description": "Success"} | ({"content": content} if content else {})
        for method in route.methods or ():
            operation = document["paths"][route.path_format][method.lower()]
            operation["responses"] = {str(route.status_code or 200): success, "default": error}


def _json_types(route: APIRoute) -> dict[Key, Any]:
    """Types of JSON in the responses of a route: of the body, or of each event of a stream."""
    named = view_of(route.endpoint)
    if named.is_stream:
        return {(route.unique_id, event): view for event, view in get_type_hints(named.view).items()}
    return {} if named.view in (None, bytes) else {(route.unique_id, ""): named.view}


def _content(route: APIRoute, by_key: dict[Key, Data]) -> Data:
    named = view_of(route.endpoint)
    if named.view is None:
        return {}
    if named.view is bytes:
        return {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    if not named.is_stream:
        return {"application/json": {"schema": by_key[route.unique_id, ""]}}
    events = [_event(name, by_key[route.unique_id, name]) for name in get_type_hints(named.view)]
    return {"text/event-stream": {"itemSchema": {"oneOf": events}}}


def _event(name: str, schema: Data) -> Data:
    """An event as OpenAPI 3.2 describes it, and FastAPI in documents of 3.1, too."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
    return {"type": "object", "properties": {"event": {"const": name}, "data": data}, "required": ["event", "data"]}


def _describe_fields(schemas: Data, views: Iterable[Any]) -> None:
    """Add the docstrings of fields to their schemas, also to those that a view inherits."""
    for view in _nested(views):
        properties = schemas[view.__name__]["properties"]
        for name, text in field_descriptions(view).items():
            properties[name]["description"] = text


def _nested(views: Iterable[Any]) -> list[Any]:
    """All views in `views`, in any depth."""
    nested: dict[Any, None] = {}
    waiting = list(views)
    while waiting:
        annotation = waiting.pop()
        if is_typeddict(annotation):
            if annotation not in nested:
                nested[annotation] = None
                waiting += get_type_hints(annotation).values()
        else:
            waiting += getattr(annotation, "__args__", ())
    return list(nested)


def field_descriptions(view: Any) -> dict[str, str]:
    """Docstrings below the fields of a view and of those that it inherits from, by field."""
    descriptions: dict[str, str] = {}
    for base in get_original_bases(view):
        descriptions |= field_descriptions(base) if is_typeddict(base) else {}
    return descriptions | _docstrings(view.__module__).get(view.__name__, {})


@cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    """Docstrings below fields, by class and field; {} if the module is installed without its source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except OSError:
        return {}
    return {node.name: dict(_fields(node)) for node in tree.body if isinstance(node, ast.ClassDef)}


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, text in pairwise(node.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            yield ast.unparse(field.target), " ".join(str(text.value.value).split())

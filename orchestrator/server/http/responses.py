"""Responses of the server: strict JSON, and a uniform form of errors."""

import json
import math
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from cluster.errors import Conflict, FleetError, NotFound, PolyfleetError, SpecError, UserError
from cluster.input.validation_errors import WrongValueError
from orchestrator.limits import LimitExceeded

STATUS = (
    *(
        (NotFound, 404),
        (Conflict, 409),
        (UserError, 422),
        (LimitExceeded, 429),
        (FleetError, 503),
        (PolyfleetError, 500),
    ),
)


def to_json(data: Any, ascii_only: bool = False) -> str:
    """Encode strict JSON: numbers that JSON lacks (a loss may be NaN) become the strings "NaN" and "Infinity"."""
    try:
        return json.dumps(data, allow_nan=False, ensure_ascii=ascii_only, separators=(",", ":"))
    except ValueError:
        return json.dumps(_finite(data), allow_nan=False, ensure_ascii=ascii_only, separators=(",", ":"))


def _finite(data: Any) -> Any:
    if isinstance(data, float) and not math.isfinite(data):
        return "NaN" if math.isnan(data) else "Infinity" if data > 0 else "-Infinity"
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    return [_finite(value) for value in data] if isinstance(data, list | tuple) else data


def json_response(data: Any, status: int = 200) -> Response:
    """Response of every route. Lone surrogates, which UTF-8 cannot encode, become `?`."""
    return Response(to_json(data).encode("utf-8", "replace"), status, media_type="application/json")


def error_body(error: PolyfleetError) -> dict[str, Any]:
    body: dict[str, Any] = {"type": type(error).__name__, "message": error.message, "remedy": error.remedy}
    if isinstance(error, SpecError):
        body["field"] = error.field
    return {"error": body}


def internal_error(error: Exception) -> dict[str, Any]:
    message = f"the server failed: {type(error).__name__}: {error}"
    return {
        "error": {
            "type": "InternalError",
            "message": message,
            "remedy": "see the traceback in its log, logs/server.log",
        }
    }


def status_of(error: PolyfleetError) -> int:
    return next(status for kind, status in STATUS if isinstance(error, kind))


def simple_error(status: int, kind: str, message: str, remedy: str = "") -> Response:
    return json_response({"error": {"type": kind, "message": message, "remedy": remedy}}, status)


def error_response(error: PolyfleetError) -> Response:
    response = json_response(error_body(error), status_of(error))
    if (retry_after_s := getattr(error, "retry_after_s", None)) is not None:
        response.headers["Retry-After"] = str(retry_after_s)
    return response


def install(app: FastAPI) -> None:
    """Install handlers that return all errors of `app` in one form; unexpected ones are logged with a traceback."""

    @app.exception_handler(PolyfleetError)
    async def polyfleet_error(request: Request, error: PolyfleetError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return json_response(error_body(UserError("the body is not JSON", "send a JSON object")), 422)
        location = [str(part) for part in first["loc"][1:]]  # the first is where it is: path, query, header or body
        message, remedy = first["msg"], "see /openapi.json for what is accepted"
        if isinstance(wrong := first.get("ctx", {}).get("error"), WrongValueError):
            message, remedy = wrong.message, wrong.remedy or remedy
        return json_response(error_body(SpecError(".".join(location), message, remedy)), 422)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        status = 422 if error.status_code == 400 else error.status_code  # 400: FastAPI could not parse the body as JSON
        kind = {404: "NotFound", 413: "TooLarge"}.get(status, "UserError")
        return simple_error(status, kind, str(error.detail), "see /openapi.json for what is accepted")

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return json_response(internal_error(error), 500)

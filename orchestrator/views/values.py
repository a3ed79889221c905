"""Values that several views contain, and errors."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

JsonObject = dict[str, Any]
"""An object whose keys are not fixed: written by a user, or described elsewhere."""
Scalar = str | int | float | bool | None
Number = float | Literal["NaN", "Infinity", "-Infinity", "nan", "inf", "-inf"]
"""A number that may be one of those that JSON lacks; the short forms are written by a job or a benchmark session."""


class AllocationView(TypedDict):
    """Devices of one node that an attempt holds or would hold."""

    devices: str
    """The node and the kind of its devices, as NODE/KIND."""
    numbers: list[int]
    """Numbers of the devices on the node."""


class ErrorView(TypedDict):
    """What went wrong, and what to do."""

    type: str
    """Name of the error, such as NotFound or SpecError."""
    message: str
    remedy: str
    """What to do; it may be empty."""
    field: NotRequired[str]
    """The field of the request that is wrong, such as `resources.count`."""


class ErrorBodyView(TypedDict):
    """Body of every response with status 400 or above."""

    error: ErrorView


class StreamErrorView(ErrorView):
    """Error of a stream that has started."""

    status: int
    """The HTTP status that a request with this error has."""


class StreamEvents(TypedDict, total=False):
    """Events of a stream: the name of an event, and its data. Every stream may end with `error`."""

    error: StreamErrorView
    """Why the stream ends here."""


class ProgressEvent(TypedDict):
    """Progress of a long-running operation, in bytes."""

    done_bytes: int
    total_bytes: int

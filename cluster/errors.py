"""Base classes of the errors that Polyfleet raises on purpose.

PolyfleetError          what happened, with numbers, and what to do next
├── UserError           the user can correct it: exit code 2, HTTP 422
│   ├── SpecError       a field of a file or request is wrong; names the field
│   ├── NotFound        no such job, pool or checkpoint: HTTP 404
│   └── Conflict        the same key with another body, or a second writer: HTTP 409
└── FleetError          the fleet cannot serve now (no head, no disk space, no node): exit code 3, HTTP 503
"""

MAX_NAMED, CLOSE_NAMED = 100, 10


class PolyfleetError(Exception):
    """An error with a message and a remedy.

    `args` equals the arguments of `__init__`, so it survives pickling and Ray.
    """

    exit_code = 1

    def __init__(self, message: str, remedy: str = ""):
        super().__init__(message, remedy)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


class UserError(PolyfleetError):
    exit_code = 2


class SpecError(UserError):
    """A wrong field of a file or request. `field` is a dotted path, e.g. `pools.xla.devices`."""

    def __init__(self, field: str, message: str, remedy: str = ""):
        super().__init__(f"{field}: {message}" if field else message, remedy)
        self.args = (field, message, remedy)
        self.field = field


class NotFound(UserError):
    pass


class Conflict(UserError):
    pass


class FleetError(PolyfleetError):
    exit_code = 3


def nearest(name: str, valid: "list[str] | tuple[str, ...]") -> str:
    """Return the remedy for an unknown name: the closest valid name, then all valid names.

    Of more than MAX_NAMED only the closest are listed.
    """
    from difflib import get_close_matches  # not at the top: supervisors of attempts import this file and never need it

    close = get_close_matches(name, valid, n=1, cutoff=0.5)
    if len(valid) > MAX_NAMED:
        closest = get_close_matches(name, valid, n=CLOSE_NAMED, cutoff=0.0)
        choices = f"{', '.join(closest)} and {len(valid) - len(closest)} more"
    else:
        choices = ", ".join(valid) or "none"
    return f"did you mean {close[0]!r}? valid: {choices}" if close else f"valid: {choices}"

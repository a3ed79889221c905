"""The one base class of every error Polyfleet raises on purpose.

PolyfleetError          what happened, with numbers, and what to do next
└── UserError           the user can mend it: exit code 2, HTTP 422
    ├── SpecError       a field of a file or request is wrong; names the field
    ├── NotFound        no such job, pool, checkpoint; HTTP 404
    └── Conflict        the same key with another body, a second writer; HTTP 409
└── FleetError          the fleet cannot serve now (no head, no disk, no node): exit code 3, HTTP 503
"""

MOST_NAMED, CLOSE_NAMED = 100, 10


class PolyfleetError(Exception):
    """`args` equals the arguments of `__init__`, so the error survives pickling and Ray."""

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
    """`field` is a dotted path, e.g. `pools.xla.devices`."""

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


def nearest(word: str, valid: "list[str] | tuple[str, ...]") -> str:
    """The remedy for an unknown word: the closest valid one first, then all of them, or the closest of very many."""
    from difflib import get_close_matches  # here: supervisors of attempts start with this file, and never need it

    close = get_close_matches(word, valid, n=1, cutoff=0.5)
    if len(valid) > MOST_NAMED:
        some = get_close_matches(word, valid, n=CLOSE_NAMED, cutoff=0.0)
        everything = f"{', '.join(some)} and {len(valid) - len(some)} more"
    else:
        everything = ", ".join(valid) or "none"
    return f"did you mean {close[0]!r}? valid: {everything}" if close else f"valid: {everything}"

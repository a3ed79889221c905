"""The table of actions that the guard reads: each method and path, with what a request for it must satisfy."""

import re
from dataclasses import dataclass

from starlette.routing import compile_path

from orchestrator.verbs.declare import JSON_BODY, RequestBody, Role, Verb


@dataclass(frozen=True, slots=True)
class Action:
    """One row. `least` is the lowest role that may request it; None: also without a token. `may_stay_open`: it is not
    counted as a request in progress, because it has a separate limit.
    """

    method: str
    path: str
    least: Role | None
    body: RequestBody = JSON_BODY
    may_stay_open: bool = False


def action_of(verb: Verb) -> Action:
    return Action(verb.method, verb.path, verb.least, verb.body, verb.may_stay_open)


class ActionTable:
    """Finds actions as the router finds routes: with the same expressions, and the first that matches."""

    def __init__(self) -> None:
        self._rows: list[tuple[re.Pattern[str], Action]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, action: Action) -> None:
        pattern, _, _ = compile_path(action.path)
        self._rows.append((pattern, action))

    def find(self, method: str, path: str) -> Action | None:
        """Return the action of a request, None if there is none. `path` is decoded, as in ASGI."""
        return next((action for pattern, action in self._rows if action.method == method and pattern.match(path)), None)

    def methods_of(self, path: str) -> list[str]:
        """Methods of all actions that have this path."""
        return sorted({action.method for pattern, action in self._rows if pattern.match(path)})

"""Each row of the table of actions, over HTTP: no token 401, another content type 415, a larger body 413."""

import http.client
import re
from typing import Any, cast

import pytest
from patience import LIMIT_S

from orchestrator.server.app import ROUTERS, make_app
from orchestrator.server.guard import SAFE_METHODS
from orchestrator.server.http.response_views import routes_of
from orchestrator.services.service import Service
from orchestrator.verbs.declare import Exchange, RequestBody, Verb, all_verbs

ROWS = sorted(all_verbs(), key=lambda each: each.action)
OTHER_TYPES = ("text/plain", "application/json", "application/octet-stream", "application/zip", "")


def path_of(verb: Verb) -> str:
    return re.sub(r"{(\w+)}", "x", verb.path)


def status(live, verb: Verb, token: bool = True, **headers: Any) -> int:
    """Sends a head alone: the body of a request that is refused is not read."""
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=LIMIT_S)
    try:
        connection.putrequest(verb.method, path_of(verb))
        known = {"Authorization": f"Bearer {live.token}"} if token else {}
        for name, value in (known | headers).items():
            connection.putheader(name.replace("_", "-"), str(value))
        connection.endheaders()
        return connection.getresponse().status
    finally:
        connection.close()


def named(rows: list[Verb]) -> Any:
    return pytest.mark.parametrize("verb", rows, ids=[each.action for each in rows])


@named([each for each in ROWS if each.least is not None])
def test_each_action_needs_the_token(shared_live, verb):
    assert status(shared_live, verb, token=False, Content_Type=verb.body.content_type, Content_Length=0) == 401


@named([each for each in ROWS if each.method not in SAFE_METHODS])
def test_each_action_that_changes_something_accepts_one_content_type(shared_live, verb):
    others = [kind for kind in OTHER_TYPES if kind != verb.body.content_type]
    assert [status(shared_live, verb, Content_Type=kind, Content_Length=0) for kind in others] == [415] * len(others)


@named([each for each in ROWS if each.least is not None])
def test_each_action_has_a_limit_of_its_body(shared_live, verb):
    too_large = verb.body.limit_bytes + 1
    assert status(shared_live, verb, Content_Type=verb.body.content_type, Content_Length=too_large) == 413


def test_the_table_and_the_router_agree_on_each_path():
    """Else the guard would check the row of one action, and the router would call another."""
    actions, routes = make_app(cast(Service, None), "").actions, list(routes_of(ROUTERS))
    assert len(actions) == len(ROWS) + 1
    for verb in ROWS:
        path = path_of(verb)
        route = next(each for each in routes if verb.method in each.methods and each.path_regex.match(path))
        action = actions.find(verb.method, path)
        assert route.operation_id == verb.action
        assert action is not None and (action.method, action.path) == (verb.method, verb.path)


def test_only_these_actions_accept_more_than_a_mebibyte():
    larger = {each.action: each.body for each in ROWS if each.body != RequestBody()}
    piece = RequestBody("application/octet-stream", (8 << 20) + 1024)
    assert larger == {
        "checkpoints.begin_upload": RequestBody("application/octet-stream", 256 << 20),
        "checkpoints.send_chunk": piece,
        "code_archives.put": RequestBody("application/zip", 512 << 20),
        "files.send_piece": piece,
        "jobs.submit_many": RequestBody("application/json", 16 << 20),
    }


def test_what_has_a_limit_of_its_own_is_not_counted_as_in_progress():
    not_counted = {each.action for each in ROWS if each.may_stay_open}
    assert {"changes.wait", "changes.follow", "jobs.follow", "execs.start", "files.list", "server.ping"} <= not_counted
    assert {each.action for each in ROWS if each.exchange is Exchange.OPERATION} <= not_counted
    assert not [each.action for each in ROWS if each.may_stay_open and each.exchange is Exchange.UPLOAD]
    assert not {"jobs.list", "jobs.submit", "jobs.logs", "fleet.doctor"} & not_counted

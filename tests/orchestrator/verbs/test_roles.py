"""Each verb of the server has a role, which is right for what it does."""

from typing import Any

import pytest

from orchestrator.server.app import ROUTERS
from orchestrator.server.guard import SAFE_METHODS
from orchestrator.server.http.response_views import routes_of
from orchestrator.verbs.declare import Role, all_verbs, verb


def test_a_verb_without_a_role_is_an_error():
    declare: Any = verb
    with pytest.raises(TypeError, match="least"):
        declare("GET /v1/boxes")


def test_each_declared_verb_is_a_route():
    routes = {(method, route.path) for route in routes_of(ROUTERS) for method in route.methods}
    declared = {(each.method, each.path) for each in all_verbs()}
    assert declared
    assert declared <= routes


def test_only_the_health_check_needs_no_token():
    assert [each.action for each in all_verbs() if each.least is None] == ["server.ping"]


def test_a_viewer_changes_nothing():
    by_viewers = [each for each in all_verbs() if each.least is Role.VIEWER]
    assert not [each.action for each in by_viewers if each.takes_key or each.parameters_of(bytes)]
    changing = {each.action for each in by_viewers if each.method not in SAFE_METHODS}
    assert changing == {"jobs.plan", "jobs.offers"}, "these only read"


def test_each_role_includes_those_below_it():
    assert Role.VIEWER < Role.MEMBER < Role.ADMIN

"""Views, and the routes that name them. That responses are of these views is checked where a test has a server."""

import ast
import inspect
import json
import sys
import types
from dataclasses import fields, is_dataclass
from enum import EnumMeta
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import pytest
from response_checks import problem
from typing_extensions import is_typeddict

from cluster.catalogue.device_metrics import LIVE_METRICS
from cluster.input.folder_entries import FolderEntry
from cluster.types import Device, DeviceUse, Finding, NodeFacts, Notice
from orchestrator.benchmark.suite import BenchmarkRequest
from orchestrator.core import rate_source
from orchestrator.core.explanation.explain import CandidateExplanation, Explanation
from orchestrator.core.explanation.offer import Offer, Offers
from orchestrator.core.explanation.offer_plan import When
from orchestrator.core.explanation.what_if import OtherJob
from orchestrator.core.fleet.leaked_devices import Leak
from orchestrator.core.jobs import remaining_time
from orchestrator.core.model import Policy, Start
from orchestrator.core.plan.options.quota import Holding
from orchestrator.core.rate_source import WorkloadRate
from orchestrator.core.states import State
from orchestrator.runtime.agents.ray_calls import Blocked
from orchestrator.runtime.benchmarks.job_requests import JobRequest
from orchestrator.runtime.controller.inbox import Repair
from orchestrator.runtime.health.health import ControllerHealth, HealthSnapshot, NodeHealth, StoreHealth
from orchestrator.server.app import ROUTERS, make_app
from orchestrator.server.http.response_views import field_descriptions, routes_of, view_of
from orchestrator.services.service import Service
from orchestrator.services.views import FIELDS
from orchestrator.views import (
    benchmark_lines,
    benchmarks,
    checkpoint_results,
    checkpoints,
    files,
    fleet,
    jobs,
    logs,
    plans,
    server,
    values,
)
from orchestrator.views.values import ProgressEvent, StreamErrorView
from workers.checkpoint.conversion.load_report import ConversionLoss, TensorReport
from workers.checkpoint.format.manifest import Producer
from workers.protocol.messages import Failure

MODULES = [sys.modules[name] for name in sorted(sys.modules) if name.startswith("orchestrator.views.")]
VIEWS = {
    view.__name__: view
    for module in MODULES
    for view in vars(module).values()
    if is_typeddict(view) and view.__module__ == module.__name__
}
DATA = Path(__file__).parents[2] / "data"
FOLDER = Path(cast(str, values.__file__)).parent
ROUTES = list(routes_of(ROUTERS))
RESTATED: dict[type, tuple[Any, set[str]]] = {
    DeviceUse: (fleet.DeviceUseView, {"metrics", *(metric.name for metric in LIVE_METRICS)}),
    Device: (fleet.DeviceView, {"allocated_to"}),
    Notice: (fleet.NoticeView, set()),
    Finding: (fleet.NodeFindingView, set()),
    NodeFacts: (fleet.NodeView, {"state", "reason", "closed", "note"}),
    Policy: (fleet.PolicyView, set()),
    Holding: (fleet.QuotaView, set()),
    CandidateExplanation: (plans.CandidateView, set()),
    Explanation: (plans.ExplanationView, set()),
    Start: (plans.StartView, {"allocation", "allocations"}),
    OtherJob: (plans.OtherJobView, set()),
    WorkloadRate: (plans.RateView, {"at_s", "updated_at"}),
    Offer: (plans.OfferView, {"allocation", "allocations"}),
    Offers: (plans.OffersView, set()),
    ControllerHealth: (server.ControllerHealthView, set()),
    NodeHealth: (server.NodeHealthView, set()),
    StoreHealth: (server.StoreHealthView, set()),
    Blocked: (server.BlockedView, set()),
    Leak: (server.LeakView, set()),
    Repair: (server.RepairView, set()),
    HealthSnapshot: (server.HealthSnapshotView, set()),
    Failure: (jobs.FailureView, set()),
    Producer: (checkpoints.ProducerView, set()),
    ConversionLoss: (checkpoint_results.LossView, set()),
    TensorReport: (checkpoint_results.ConvertedTensor, set()),
    JobRequest: (benchmark_lines.RequestedTarget, set()),
}
"""View of each dataclass, and the fields that only one of them has."""
NARROWED = {(Finding, "level")}
"""Texts of which a view lists the possible ones."""
NULLABLE = {NodeFacts}
"""Dataclasses that may be absent: numbers of their views are then null."""


def json_type(annotation: Any) -> Any:
    """The type of a Python value as JSON."""
    if isinstance(annotation, EnumMeta):
        return Literal[tuple(str(member) for member in annotation)]
    if is_dataclass(annotation):
        return RESTATED[cast(type, annotation)][0]
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return reduce(or_, map(json_type, inner))
    if origin is tuple:
        return list[reduce(or_, (json_type(part) for part in inner if part is not Ellipsis))]
    if origin in (dict, list):
        return origin[tuple(json_type(part) for part in inner)]
    return annotation


def is_same(view_type: Any, restated: Any) -> bool:
    origins = {get_origin(view_type), get_origin(restated)}
    if origins <= {Union, types.UnionType}:
        return set(get_args(view_type)) == set(get_args(restated))
    if origins == {list} or origins == {dict}:
        return all(map(is_same, get_args(view_type), get_args(restated)))
    return bool(view_type == restated)


@pytest.mark.parametrize("restated", RESTATED, ids=lambda restated: restated.__name__)
def test_a_view_that_restates_a_dataclass_has_its_names_and_types(restated):
    view, different = RESTATED[restated]
    hints, own = get_type_hints(view), get_type_hints(restated)
    names = {field.name for field in fields(restated)}
    assert set(hints) ^ names == different
    unequal = {
        name: (hints[name], json_type(own[name]))
        for name in names & set(hints)
        if not is_same(hints[name], json_type(own[name]))
        and (restated, name) not in NARROWED
        and not (restated in NULLABLE and is_same(hints[name], json_type(own[name]) | None))
    }
    assert not unequal


def test_a_view_that_restates_a_pydantic_model_or_a_typed_dict_has_its_names():
    assert set(get_type_hints(benchmarks.BenchmarkRequestView)) == set(BenchmarkRequest.model_fields)
    times = {"modified_s", "modified_at"}
    assert set(get_type_hints(files.FileView)) ^ set(get_type_hints(FolderEntry)) == times


def test_the_load_of_a_device_has_the_metrics_that_agents_send():
    types = {metric.name: int if metric.is_integer else float for metric in LIVE_METRICS}
    hints = get_type_hints(fleet.DeviceUseView)
    assert hints == {"backend": str, "index": int} | {name: number | None for name, number in types.items()}


def test_words_with_fixed_values_are_those_of_the_code():
    assert get_args(jobs.JobState) == tuple(map(str, State))
    assert get_args(plans.OfferWhen) == tuple(map(str, When))
    assert get_args(plans.RateSource) == get_args(rate_source.Source)
    assert get_args(get_type_hints(jobs.ProgressView)["left_from"]) == get_args(remaining_time.Source)


def test_a_job_has_the_fields_of_its_view():
    assert tuple(get_type_hints(jobs.JobView)) == FIELDS


def test_every_route_names_a_view():
    for route in ROUTES:
        named = view_of(route.endpoint)
        used = get_type_hints(named.view).values() if named.is_stream else [named.view]
        for view in used:
            parts = set(_parts(view))
            assert parts <= {*VIEWS.values(), str, int, float, bool, bytes, None, type(None), Any}, route.path


def _parts(view: Any) -> list[Any]:
    inner = get_args(view)
    return [part for argument in inner for part in _parts(argument)] if inner else [view]


def test_a_view_has_one_name_and_a_docstring_of_its_own():
    names = [node.name for path in FOLDER.glob("*.py") for node in ast.parse(path.read_text()).body
             if isinstance(node, ast.ClassDef)]  # fmt: skip
    assert len(set(names)) == len(names)
    assert not {view.__name__ for view in VIEWS.values() if not inspect.getdoc(view) and view.__name__[0] != "_"} - {
        "MoveReshard"
    }


def test_views_import_typing_and_each_other_alone():
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.Import), path
            if isinstance(node, ast.ImportFrom):
                assert node.module in ("typing", "typing_extensions") or str(node.module).startswith(
                    "orchestrator.views."
                )


def test_views_have_no_tuples():
    assert not [name for name, view in VIEWS.items() for hint in get_type_hints(view).values() if "tuple" in str(hint)]


def test_the_openapi_document_has_a_schema_for_each_response():
    document = make_app(cast(Service, None), "").openapi()
    operations = [pair for methods in document["paths"].values() for pair in methods.items()]
    assert len(operations) == len(ROUTES)
    for _, operation in operations:
        success, error = operation["responses"].values()
        assert error["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorBodyView")
        for content in success.get("content", {}).values():
            assert content.get("schema") or content["itemSchema"]["oneOf"], operation["operationId"]
    without_body = {method for method, o in operations if "content" not in next(iter(o["responses"].values()))}
    assert without_body == {"head"}


def test_the_openapi_document_describes_fields_also_those_that_a_view_inherits():
    document = make_app(cast(Service, None), "").openapi()
    schemas = document["components"]["schemas"]
    assert (
        schemas["JobView"]["properties"]["attempt"]["description"] == "Number of its last attempt, 0 before the first."
    )
    assert "late" in field_descriptions(plans.JobExplanation)
    assert schemas["JobExplanation"]["properties"]["late"]["description"].startswith("By how much")


def test_streams_name_their_events():
    streams = {
        route.operation_id: get_type_hints(view_of(route.endpoint).view)
        for route in ROUTES
        if view_of(route.endpoint).is_stream
    }
    progress = {"error": StreamErrorView, "progress": ProgressEvent}
    assert streams == {
        "changes.follow": get_type_hints(jobs.ChangeEvents),
        "jobs.follow": get_type_hints(logs.LogEvents),
        "execs.start": get_type_hints(logs.ExecEvents),
        "checkpoints.copy": progress | {"result": checkpoint_results.CopyResult},
        "checkpoints.verify": progress | {"result": checkpoint_results.VerifyResult},
        "checkpoints.diff": progress | {"result": checkpoint_results.DiffResult},
        "checkpoints.convert": progress | {"result": checkpoint_results.ConversionResult},
        "checkpoints.prune": progress | {"result": checkpoint_results.PruneResult},
        "checkpoints.pin": progress | {"result": checkpoint_results.PinResult},
        "checkpoints.import": progress | {"result": checkpoint_results.ImportResult},
        "checkpoints.export": progress | {"result": checkpoint_results.ExportResult},
    }
    assert all("error" in events for events in streams.values())


def test_results_of_a_real_benchmark_run_are_of_their_views():
    first, *lines = (DATA / "benchmark-run.jsonl").read_text().splitlines()
    assert "jobs" not in json.loads(first)  # of a run without a fleet, which no server returns
    for number, line in enumerate(lines, 2):
        current = {"time": 0.0} | json.loads(line) | {"seq": number}
        assert not problem(benchmark_lines.BenchmarkLine, json.dumps(current).encode())


def test_a_key_more_or_less_or_of_another_type_is_a_problem():
    event = {
        "seq": 1,
        "occurred_at": "2026-11-20T11:00:00.000+00:00",
        "job": "a",
        "event": "started",
        "attempt": 1,
        "state": "RUNNING",
        "data": {"x": [1]},
    }
    report = {
        "seq": 1,
        "attempt": 1,
        "step": 3,
        "reported_at": "2026-11-20T11:00:00.000+00:00",
        "of": 9,
        "metrics": {"loss": 0.5, "note": "text"},
    }

    def has_problem(view, data, **changes):
        changed = {name: value for name, value in (data | changes).items() if value is not None}
        return bool(problem(view, json.dumps(changed).encode()))

    assert not has_problem(jobs.JobEvent, event)
    assert has_problem(jobs.JobEvent, event, more=1)
    assert has_problem(jobs.JobEvent, event, job=None)
    assert has_problem(jobs.JobEvent, event, attempt="1")
    assert has_problem(jobs.JobEvent, event, state="DONE")
    assert not has_problem(jobs.ReportView, report)
    assert has_problem(jobs.ReportView, report, step=None)
    assert has_problem(jobs.ChangesPage, {"last": 1, "events": [event | {"more": 1}]})

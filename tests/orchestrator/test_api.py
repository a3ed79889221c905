"""The Python interface mirrors the CLI, raises our errors, and shows itself as tables."""

import inspect
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import get_type_hints

import pytest
from rich.console import Console

import orchestrator
from cluster.errors import FleetError, NotFound, SpecError
from orchestrator import (
    BenchmarkJob,
    Candidate,
    JobFailed,
    Orchestrator,
    PrepareJob,
    Resources,
    RunJob,
    TrainJob,
    units,
)
from orchestrator.python_api.benchmarks import Benchmarks
from orchestrator.python_api.checkpoints import Checkpoints
from orchestrator.python_api.fleet import Fleet
from orchestrator.python_api.jobs import Jobs
from orchestrator.python_api.nodes import Nodes
from orchestrator.python_api.server import Server
from orchestrator.show import jobs as show_jobs
from orchestrator.show.notebook_views import KeyValueView, TableView
from orchestrator.submission.jobs import JobHandle, Log, LogLine

HOSTILE = "<script>alert(1)</script>\x1b]0;pwned\x07"


@pytest.fixture
def o(live):
    with Orchestrator.connect(start=False) as o:
        yield o


def text(shown):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


@pytest.mark.parametrize("as_path", [str, Path])
def test_a_home_and_a_fleet_file_are_paths_or_texts(live, tmp_path, as_path):
    with Orchestrator.connect(as_path(live.home), start=False) as o:
        assert o.jobs.list() == []
    file = tmp_path / "fleet.yaml"
    file.write_text("pools: {a: {backend: nvidiaa}}")
    with pytest.raises(SpecError, match="did you mean 'nvidia'"):
        Orchestrator.up(as_path(file))


def test_importing_the_package_imports_nothing_else():
    heavy = ("torch", "ray", "httpx", "pydantic", "rich")
    code = f"import sys, orchestrator; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_public_name_is_there():
    assert [name for name in orchestrator.__all__ if getattr(orchestrator, name, None) is None] == []
    assert orchestrator.__all__ == sorted(orchestrator.__all__) == dir(orchestrator)
    with pytest.raises(AttributeError, match="no attribute 'Absent'"):
        _ = orchestrator.Absent


def test_jobs_are_specs_of_their_task():
    where = Resources(any_of=[Candidate(accelerators="nvidia:H100:8"), {"accelerators": "cpu:1"}])
    job = TrainJob(entry="train.py", working_dir=".", resources=where)
    assert (job.task, job.name) == ("train", "train")
    assert len(job.to_job("x", 0.0).candidates) == 2
    assert PrepareJob(entry="m:make").task == "prepare"
    assert BenchmarkJob(entry="m:make").task == "benchmark"
    assert RunJob(command=["true"], resources={"accelerators": "cpu:1"}).argv == ("true",)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: TrainJob(entri="train.py"), "entri"),
        (lambda: TrainJob(), "entry"),
        (lambda: RunJob(), "command"),
        (lambda: RunJob(command=["true"], entry="x.py"), "entry"),
        (lambda: Resources(accelerator="cpu"), "accelerator"),
        (lambda: Resources(accelerators="nvidia:H100:none:x"), "accelerators"),
        (lambda: Candidate(nodes=0), "nodes"),
        (lambda: TrainJob(entry="train.py", resources={"accelerators": "nvidiaa"}), "resources.accelerators"),
    ],
)
def test_a_wrong_field_is_our_error_and_names_it(make, field):
    with pytest.raises(SpecError) as caught:
        make()
    assert caught.value.field == field


def test_a_job_is_submitted_waited_for_and_read(o, live):
    job = o.submit(RunJob(name="hello", command=["echo", "hello from hello"]))
    assert job.wait().state == "SUCCEEDED"
    assert [(line.text, line.rank, line.stream) for line in job.logs()] == [("hello from hello", 0, "stdout")]
    assert str(job.logs(tail=1)) == "hello from hello"
    assert [line.text for line in job.follow()] == ["hello from hello"]
    assert (job.result(), job.metrics, job.view["id"]) == ({}, {}, job.id)
    assert job.history()[0]["event"] == "submitted"
    assert job.reports() == []
    assert o.job("hello").id == job.id
    assert repr(job) == f"<job {job.id}>"
    assert live.specs == [{"task": "run", "name": "hello", "command": ["echo", "hello from hello"]}]


def test_a_folder_travels_with_its_job(o, live, tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("def train(ctx): ...")
    monkeypatch.chdir(tmp_path)
    job = o.submit(TrainJob(entry="train.py", working_dir="code", resources={"pool": "xla"}))
    (spec,) = live.specs
    assert spec["working_dir"] == str(tmp_path / "code")
    (archive,) = (live.home / "packages").glob("*.zip")
    assert live.service.jobs_table[job.id].job.package == archive.stem


def test_a_missing_folder_is_refused_before_anything_is_sent(o, live, tmp_path):
    with pytest.raises(SpecError, match="does not exist"):
        o.submit(TrainJob(entry="train.py", working_dir=str(tmp_path / "absent")))
    assert live.specs == []


def test_the_result_of_a_failed_job_is_its_failure(o):
    job = o.submit(RunJob(name="fail", command="echo 'ValueError: no' >&2; exit 3"))
    with pytest.raises(JobFailed, match=r"ended as FAILED: rank 0 ended with exit code 3: ValueError: no"):
        job.result()


def test_logs_are_read_to_their_end_page_by_page(o, live):
    job = o.submit(RunJob(name="hello", command=["true"])).wait()
    live.fleet.printed(job.id, [f"{n} {'x' * 1000}" for n in range(3000)])  # three pages of the server
    assert [line.text.partition(" ")[0] for line in job.logs()] == [str(n) for n in range(3000)]


def test_nothing_is_submitted_by_a_plan(o, live):
    plan = o.jobs.plan({"task": "run", "command": "true"})
    assert plan["would_start"]["candidate"] == 1
    assert "would start as candidate 1" in text(plan)
    assert live.specs == []


def test_answers_are_plain_data_that_show_themselves(o, checkpoint):
    job = o.submit(RunJob(name="hello", command=["true"])).wait()
    assert [p["pool"] for p in o.fleet.show()["pools"]] == ["cpu", "ipex", "xla"]
    for shown, words in (
        (o.fleet.show(), ("POOL", "tpu:emulated")),
        (o.inventory(), ("23.5 GiB", "XLA on Intel")),
        (o.fleet.backends(), ("Google TPU", "no pool of this back end")),
        (o.fleet.doctor(), ("no findings",)),
        (o.jobs.list(), ("SUCCEEDED", job.id)),
        (job, ("SUCCEEDED", "ATTEMPT")),
        (job.explain(), ("fits", "tpu:emulated")),
        (o.checkpoints.list(), ("cpu:digits/step-00000012",)),
        (o.checkpoints.show(checkpoint), ("step",)),
        (o, ("fleet demo", job.id)),
    ):
        assert [word for word in words if word not in text(shown)] == []
        assert [word for word in words if word not in shown._repr_html_()] == []


@pytest.fixture
def stopped_clock(monkeypatch):
    """Ages are printed as of one moment, so that two prints of one answer are equal."""

    class Stopped(datetime):
        @classmethod
        def now(cls, tz=None):
            return moment

    moment = datetime.now(UTC)
    monkeypatch.setattr(units, "datetime", Stopped)


def test_a_printed_answer_is_its_table_as_wide_as_the_terminal_and_no_longer_than_a_screen(
    o, checkpoint, monkeypatch, stopped_clock
):
    job = o.submit(RunJob(name="hello", command=["true"])).wait()
    for columns in (60, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        for shown in (o.fleet.show(), o.inventory(), o.fleet.backends(), o.fleet.doctor(), o.jobs.list(), job.view,
                      job.explain(), job.files(), o.checkpoints.list(), o.checkpoints.show(checkpoint),
                      o.benchmarks.list(), o.jobs.plan({"command": "true"}), o.jobs.offers({"command": "true"}),
                      o.jobs.show("hello"), o.jobs.history("hello"), job.reports(), o.jobs.explain("hello"),
                      job.result(), job.metrics, o.schema("job"), o.schema("fleet"), o.nodes.drain("cpu-0"),
                      o.nodes.resume("cpu-0"), o.server.version(), o.server.health()):  # fmt: skip
            printed = f"{shown}"
            assert printed == repr(shown) and "{'" not in printed and "\x1b" not in printed
            assert max(map(len, printed.split("\n"))) <= columns, printed
        assert str(job) == str(job.view)
    assert "working_dir" in repr(o.schema("job")) and repr(o.nodes.resume("cpu-0")) == "cpu-0: ready"
    assert "tpu:emulated" in repr(o.inventory()) and job.id in repr(o.jobs.list())
    many = TableView([dict(o.jobs.list()[0]) for _ in range(100)], show_jobs.jobs)
    assert (len(repr(many).split("\n")), repr(many).endswith("… and 41 more lines")) == (61, True)


def test_every_public_method_returns_something_that_prints_as_a_table_or_a_text():
    """Answers are views; the rest are texts, handles, connections and streams of log lines. None is a plain dict."""
    printable = {TableView, KeyValueView, Log, JobHandle, Orchestrator, str, list[str], list[JobHandle], type(None)}
    printable |= {Iterator[LogLine]}
    answers = {
        f"{owner.__name__}.{name}": get_type_hints(inspect.unwrap(getattr(member, "fget", member)))["return"]
        for owner in (Orchestrator, Jobs, Nodes, Fleet, Checkpoints, Benchmarks, Server, JobHandle)
        for name, member in vars(owner).items()
        if not name.startswith("_") and not isinstance(member, classmethod)
    }
    assert len(answers) > 50
    assert {name: answer for name, answer in answers.items() if answer not in printable} == {}


def test_what_is_on_nodes_that_are_down_is_an_error_in_python_too(o, live, checkpoint):
    job = o.submit(RunJob(name="hello", command=["echo", "hello"], resources={"pool": "cpu"})).wait()
    live.fleet.lose(live.service, "cpu-0")
    with pytest.raises(FleetError, match="the log of attempt 1 is on node cpu-0, which has been away for"):
        job.logs()
    with pytest.raises(FleetError, match="checkpoints of pool cpu on node cpu-0, which has been away for"):
        o.checkpoints.list()
    live.fleet.down(live.service)
    for ask in (o.inventory, o.fleet.backends, o.checkpoints.list, job.logs, lambda: o.nodes.drain("cpu-0")):
        with pytest.raises(FleetError, match="no fleet is up"):
            ask()


def test_hostile_names_do_not_act_in_a_notebook(o, live, recorded):
    live.fleet.hold(live.service)
    job = o.submit(RunJob(name="hello", command=["true"]))
    failure = {"rank": 0, "node": HOSTILE, "kind": "user", "message": HOSTILE, "traceback": HOSTILE, "exit_code": 1}
    recorded.happened(live.service, job.id, "failed", reason=HOSTILE, failure=failure)
    for html in (o.jobs.list()._repr_html_(), job._repr_html_(), o._repr_html_()):
        assert "<script" not in html
        assert "\x1b" not in html
        assert "&lt;script&gt;" in html


def test_checkpoints_are_listed_checked_and_moved(o, checkpoint):
    assert o.checkpoints.list("cpu", "digits")[0]["pool"] == "cpu"
    assert o.checkpoints.list("xla") == []
    assert o.checkpoints.verify(checkpoint)["ok"] is True
    assert o.checkpoints.plan(checkpoint, "tpu:v5e")["target"] == {"backend": "tpu", "kind": "tpu:v5e", "count": 1}
    assert o.checkpoints.copy(checkpoint, "xla:b")["target"] == "xla:b/step-00000012-adeb0f13"
    assert [found["path"] for found in o.checkpoints.list("xla")] == ["b/step-00000012-adeb0f13"]


def test_a_conversion_takes_a_kind_or_dtypes(o, checkpoint):
    before = o.checkpoints.show(checkpoint)["dtypes"]
    o.checkpoints.convert(checkpoint, "cpu:converted", dtype={"float32": "float64"})
    converted = o.checkpoints.show("cpu:converted")["dtypes"]
    assert "float64" in converted and converted["float32"]["bytes"] < before["float32"]["bytes"]
    with pytest.raises(SpecError, match="the target of the conversion is missing"):
        o.checkpoints.convert(checkpoint, "cpu:converted")


def test_methods_of_a_noun_take_the_name_of_a_job(o, talking):
    o.submit(talking.spec)
    assert o.jobs.rename("talks", "speaks").id == o.jobs.get("speaks").id == o.job("speaks").id
    assert [job["name"] for job in o.jobs.list(name="speaks")] == ["speaks"]
    assert o.jobs.cancel("speaks").state == "CANCELLED"
    assert [line.text for line in o.jobs.follow("speaks")] == [line.text for line in o.jobs.logs("speaks")]


def test_a_benchmark_measures_each_kind_and_compares(o, live, tmp_path, measuring):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "model.py").write_text("def make(): ...")
    answer = o.benchmarks.run(entry="model.py:make", working_dir=str(tmp_path / "code"), rounds=3)
    assert [(cell["target"], cell["kind"]) for cell in answer["results"]] == [("cpu", "cpu"), ("tpu:emulated",) * 2]
    assert answer["results"][1]["versus"]["ratio"] == pytest.approx(0.5)
    assert "0.50× ▼" in text(answer)
    (run,) = o.benchmarks.list()
    assert run["state"] == "SUCCEEDED"
    assert (run["request"]["rounds"], run["request"]["entry"], len(run["code_archive"])) == (3, "model.py:make", 64)
    with pytest.raises(SpecError, match="precisions"):
        o.benchmarks.run("mlp", precisions=["fp33"])
    with pytest.raises(NotFound, match="no case or suite 'mpl'; did you mean 'mlp'"):
        o.benchmarks.run("mpl")


def test_cancel_and_explain_take_a_reference(o, talking):
    o.submit(talking.spec)
    assert o.jobs.explain("talks")["candidates"][0]["kinds"] == ["any"]
    assert o.jobs.cancel("talks").state == "CANCELLED"
    with pytest.raises(NotFound):
        o.jobs.cancel("absent")


def test_the_schema_is_that_of_the_files():
    assert Orchestrator.schema(None, "fleet")["properties"]["pools"]

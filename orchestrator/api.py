"""Python interface of Polyfleet: most commands of the CLI, by noun. docs/reference/python.md lists them.

from orchestrator import Orchestrator, TrainJob

with Orchestrator.connect() as o:
    job = o.submit(TrainJob(entry="train.py", working_dir=".", resources={"accelerators": "cpu:1"}))
    print(job.wait().logs())
"""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from orchestrator.client import client as http
from orchestrator.python_api.benchmarks import Benchmarks
from orchestrator.python_api.checkpoints import Checkpoints
from orchestrator.python_api.fleet import Fleet
from orchestrator.python_api.jobs import Jobs
from orchestrator.python_api.nodes import Nodes
from orchestrator.python_api.server import Server
from orchestrator.show import fleet as show_fleet
from orchestrator.show import jobs as show_jobs
from orchestrator.show.notebook_views import KeyValueView, TableView, schema_fields
from orchestrator.show.table import TableStack
from orchestrator.spec.job_spec import JobSpec, get_schema
from orchestrator.submission.jobs import JobHandle

Data = dict[str, Any]
Progress = Callable[[str], None]


def _quiet(message: str) -> None:
    """Discard progress messages: the default when the caller passes no callback."""


class Orchestrator:
    """A connection to the server of this home. Most methods belong to its nouns, such as `o.jobs`.

    Results are plain lists and dicts that a notebook shows as tables.
    """

    def __init__(self, client: http.Client):
        self._client = client
        self.jobs = Jobs(client)
        self.nodes = Nodes(client)
        self.fleet = Fleet(client)
        self.checkpoints = Checkpoints(client)
        self.benchmarks = Benchmarks(client)
        self.server = Server(client)

    @classmethod
    def connect(
        cls, home: str | Path | None = None, *, start: bool = True, progress: Progress | None = None
    ) -> "Orchestrator":
        """Connect to the server of `home` (default: POLYFLEET_HOME, else ~/.polyfleet). Start it if none runs, unless
        `start` is false.
        """
        return cls(http.connect(None if home is None else Path(home), start=start, progress=progress))

    @classmethod
    def up(
        cls, file: str | Path | None = None, *, demo: bool = False, address: str = "", progress: Progress | None = None
    ) -> "Orchestrator":
        """Start a fleet on this machine (see `polyfleet up --help`) and connect. `progress` receives all messages."""
        from orchestrator.client import lifecycle

        lifecycle.up(progress or _quiet, None if file is None else Path(file), demo=demo, address=address)
        return cls.connect(progress=progress)

    def down(self, progress: Progress = _quiet) -> list[str]:
        """Stop the server and the embedded fleet, and close this connection."""
        from orchestrator.client import lifecycle

        self.close()
        return lifecycle.down(progress)

    def __enter__(self) -> "Orchestrator":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def submit(self, job: JobSpec | Data, *, key: str = "") -> JobHandle:
        """Submit a job, as `o.jobs.submit`."""
        return self.jobs.submit(job, key=key)

    def job(self, ref: str) -> JobHandle:
        """Return a job by its id, a unique prefix of the id, or its name (the newest job with that name)."""
        return self.jobs.get(ref)

    def inventory(self) -> TableView:
        """Every node with its devices, as `o.nodes.list`."""
        return self.nodes.list()

    def schema(self, kind: str) -> KeyValueView:
        """JSON Schema of a `job` or a `fleet` file. Printed, it is a table of the file's fields."""
        return KeyValueView(get_schema(kind), schema_fields)

    def __repr__(self) -> str:
        return f"<Orchestrator at {self._client.url}>"

    def __rich__(self) -> TableStack:
        return TableStack((show_fleet.fleet(self.fleet.show()), "", show_jobs.jobs(self.jobs.list(limit=10))))

    def _repr_html_(self) -> str:
        return self.__rich__().html()

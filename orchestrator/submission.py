"""A job on its way to the server: checked here first, its folder packed and sent, then submitted."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator import bundle
from orchestrator.spec import JobSpec, parse_job

if TYPE_CHECKING:
    from orchestrator.client import Client

Data = dict[str, Any]


def submit(client: "Client", job: JobSpec | Data, key: str = "") -> Data:
    """The job's view. Raises SpecError before anything is sent; the same `key` gives the same job."""
    spec = checked(job)
    if not spec.working_dir:
        return client.submit(plain(spec), "", key)
    with tempfile.TemporaryDirectory(prefix="polyfleet-") as folder:
        package = bundle.pack(Path(spec.working_dir), spec.task, Path(folder) / "package.zip")
        client.upload(package.sha, package.path)
    return client.submit(plain(spec), package.sha, key)


def plan(client: "Client", job: JobSpec | Data) -> Data:
    """What would happen now. The folder is packed to find what is wrong with it, and not sent."""
    spec = checked(job)
    if spec.working_dir:
        with tempfile.TemporaryDirectory(prefix="polyfleet-") as folder:
            bundle.pack(Path(spec.working_dir), spec.task, Path(folder) / "package.zip")
    return client.plan(plain(spec))


def checked(job: JobSpec | Data) -> JobSpec:
    """`job` as a spec whose working_dir is absolute; relative ones count from the current folder."""
    spec = job if isinstance(job, JobSpec) else parse_job(job)
    if not spec.working_dir:
        return spec
    return spec.model_copy(update={"working_dir": str(Path(spec.working_dir).expanduser().absolute())})


def plain(spec: JobSpec) -> Data:
    """What was written, as JSON-like data: defaults stay out, so that a stored spec reads as its author wrote it."""
    return spec.model_dump(mode="json", exclude_unset=True)

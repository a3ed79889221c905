"""Submit jobs from this machine: validate each, pack and upload its folder and data, then send it to the server."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.errors import SpecError, UserError
from orchestrator.code_archives import code_archive
from orchestrator.limits import MAX_BULK_JOBS
from orchestrator.spec import entry_check
from orchestrator.spec.job_spec import JobSpec, parse_job
from orchestrator.submission import data_upload

if TYPE_CHECKING:
    from orchestrator.client.client import Client
    from orchestrator.views.jobs import JobView
    from orchestrator.views.plans import ExplanationView, OffersView

Data = dict[str, Any]
Progress = Callable[[str], None]


def _quiet(message: str) -> None:
    """Discard progress: the default when the caller passes no callback."""


def submit(client: "Client", job: JobSpec | Data, key: str = "", progress: Progress = _quiet) -> "JobView":
    """Submit a job, once per `key`; return its view as accepted. Raises SpecError before anything is sent."""
    (spec,) = data_upload.add_hashes([validate(job)])
    archive_sha = _upload_folders(client, [spec]).get(spec.working_dir, "")
    data_upload.send(client, [spec], progress)
    return client.jobs.submit(to_dict(spec), code_archive=archive_sha, key=key)


def submit_many(
    client: "Client", jobs: Sequence[JobSpec | Data], key: str = "", progress: Progress = _quiet
) -> list[str]:
    """Submit jobs, all or none; return their ids in order. A folder that several jobs share is sent once."""
    if len(jobs) > MAX_BULK_JOBS:
        raise UserError(
            f"{len(jobs):,} jobs in one call; the maximum is {MAX_BULK_JOBS:,}", "submit them in several calls"
        )
    specs = data_upload.add_hashes([validate(job) for job in jobs])
    archive_shas = _upload_folders(client, specs)
    data_upload.send(client, specs, progress)
    response = client.jobs.submit_many(
        [{"spec": to_dict(spec), "code_archive": archive_shas.get(spec.working_dir, "")} for spec in specs],
        key=key,
    )
    client.notify(response["note"])
    return [row["id"] for row in response["jobs"]]


def _upload_folders(client: "Client", specs: Iterable[JobSpec]) -> dict[str, str]:
    """Pack and upload the folders that `specs` name, each once. Return the hashes of their archives by folder."""
    shas: dict[str, str] = {}
    for spec in specs:
        if spec.working_dir in shas:
            _check_entries(spec, Path(spec.working_dir))
        elif spec.working_dir:
            with code_archive.scratch() as folder:
                archive = _pack_folder(client, spec, folder)
                client.upload_code_archive(archive.sha, archive.path)
            shas[spec.working_dir] = archive.sha
    return shas


def plan(client: "Client", job: JobSpec | Data) -> "ExplanationView":
    """Return what the planner would do with the job now. Folder and data are checked but not sent: the server looks up
    measurements of a folder by its content hash.
    """
    spec, content_sha = _read(client, job)
    return client.jobs.plan(to_dict(spec), content_sha=content_sha)


def offers(client: "Client", job: JobSpec | Data) -> "OffersView":
    """List where the job could run now. Folder and data are read as by `plan`."""
    spec, content_sha = _read(client, job)
    return client.jobs.offers(to_dict(spec), content_sha=content_sha)


def _read(client: "Client", job: JobSpec | Data) -> tuple[JobSpec, str]:
    """The spec as `submit` would send it, and the SHA-256 of its folder's content."""
    (spec,) = data_upload.add_hashes([validate(job)])
    if not spec.working_dir:
        return spec, ""
    with code_archive.scratch() as folder:
        return spec, _pack_folder(client, spec, folder).content_sha


def validate(job: JobSpec | Data) -> JobSpec:
    """`job` as a spec with an absolute working_dir; a relative one starts at the current folder."""
    spec = job if isinstance(job, JobSpec) else parse_job(job)
    if spec.working_dir:
        return spec.model_copy(update={"working_dir": str(_expand_user(spec.working_dir).absolute())})
    if entry_check.is_in_folder(spec.entry):
        raise SpecError("working_dir", f"is required: {spec.entry} is a file in it", "name the folder that has it")
    return spec


def _expand_user(written: str) -> Path:
    try:
        return Path(written).expanduser()
    except RuntimeError as e:  # ~NAME of an unknown user
        raise SpecError("working_dir", f"{written}: {e}", "write the path out") from None


def _pack_folder(client: "Client", spec: JobSpec, scratch_folder: Path) -> code_archive.CodeArchive:
    """Pack the job's folder, print what is left out, and check the files that the job names."""
    folder = Path(spec.working_dir)
    archive = code_archive.pack(folder, spec.task, scratch_folder / "package.zip")
    for line in archive.left_out.messages:
        client.notify(line)
    _check_entries(spec, folder)
    return archive


def _check_entries(spec: JobSpec, folder: Path) -> None:
    """Check that functions which the job names are in its folder and can be called as its task calls them."""
    if spec.entry:
        trains = spec.task == "train"
        entry_check.check(spec.entry, folder, default="train" if trains else "", call=("ctx",) if trains else ())
    sample = spec.arguments.get("sample_input")
    if spec.task in ("prepare", "benchmark") and isinstance(sample, str) and ":" in sample:
        entry_check.check(sample, folder, "arguments.sample_input", call=("batch_size",))


def to_dict(spec: JobSpec) -> Data:
    """The spec as JSON-like data without defaults, so that a stored spec reads as its author wrote it."""
    return spec.model_dump(mode="json", exclude_unset=True)

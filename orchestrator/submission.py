"""A job on its way to the server: checked here first, its folder packed and sent, then submitted."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.errors import SpecError, UserError
from orchestrator import code_archive, data_upload, entry_check
from orchestrator.job_spec import JobSpec, parse_job
from orchestrator.limits import MOST_BULK

if TYPE_CHECKING:
    from orchestrator.client import Client

Data = dict[str, Any]
Tell = Callable[[str], None]


def _quiet(doing: str) -> None:
    """What is done meanwhile, which nobody asked for."""


def submit(client: "Client", job: JobSpec | Data, key: str = "", tell: Tell = _quiet) -> Data:
    """The job's view when it was accepted. Raises SpecError before anything is sent; one `key` makes one job."""
    (spec,) = data_upload.named([validated(job)])
    package = _sent(client, [spec]).get(spec.working_dir, "")
    data_upload.send(client, [spec], tell)
    return client.submit(to_dict(spec), package, key)


def submit_many(client: "Client", jobs: Sequence[JobSpec | Data], key: str = "", tell: Tell = _quiet) -> list[str]:
    """The ids of all of them, in this order; all are accepted or none. A folder that several name is sent once."""
    if len(jobs) > MOST_BULK:
        raise UserError(f"{len(jobs):,} jobs at once; one call takes at most {MOST_BULK:,}", "submit them in parts")
    specs = data_upload.named([validated(job) for job in jobs])
    packages = _sent(client, specs)
    data_upload.send(client, specs, tell)
    told = client.submit_many(
        [{"spec": to_dict(spec), "package": packages.get(spec.working_dir, "")} for spec in specs], key
    )
    client.tell(told["note"])
    return [row["id"] for row in told["jobs"]]


def _sent(client: "Client", specs: Iterable[JobSpec]) -> dict[str, str]:
    """Pack and upload the folders that `specs` name, each once; the names of their archives by folder."""
    packages: dict[str, str] = {}
    for spec in specs:
        if spec.working_dir in packages:
            _check_entries(spec, Path(spec.working_dir))
        elif spec.working_dir:
            with code_archive.scratch() as folder:
                package = _packed(client, spec, folder)
                client.upload(package.sha, package.path)
            packages[spec.working_dir] = package.sha
    return packages


def plan(client: "Client", job: JobSpec | Data) -> Data:
    """What would happen now. Folder and data are checked and not sent: measurements of a folder are found by a hash of
    its content.
    """
    spec, content_sha = _read(client, job)
    return client.plan(to_dict(spec), content_sha)


def offers(client: "Client", job: JobSpec | Data) -> Data:
    """Where it could run now. Folder and data are read as by `plan`."""
    spec, content_sha = _read(client, job)
    return client.offers(to_dict(spec), content_sha)


def _read(client: "Client", job: JobSpec | Data) -> tuple[JobSpec, str]:
    """The spec as it would be sent, and the SHA-256 of its folder's content."""
    (spec,) = data_upload.named([validated(job)])
    if not spec.working_dir:
        return spec, ""
    with code_archive.scratch() as folder:
        return spec, _packed(client, spec, folder).content_sha


def validated(job: JobSpec | Data) -> JobSpec:
    """`job` as a spec whose working_dir is absolute; relative ones count from the current folder."""
    spec = job if isinstance(job, JobSpec) else parse_job(job)
    if spec.working_dir:
        return spec.model_copy(update={"working_dir": str(_expanded(spec.working_dir).absolute())})
    if entry_check.is_in_folder(spec.entry):
        raise SpecError("working_dir", f"is required: {spec.entry} is a file in it", "name the folder that has it")
    return spec


def _expanded(written: str) -> Path:
    try:
        return Path(written).expanduser()
    except RuntimeError as e:  # ~NAME of nobody
        raise SpecError("working_dir", f"{written}: {e}", "write the path out") from None


def _packed(client: "Client", spec: JobSpec, into: Path) -> code_archive.CodeArchive:
    """The folder as an archive, once what the job names in it is there; the user is told what is left out."""
    folder = Path(spec.working_dir)
    package = code_archive.pack(folder, spec.task, into / "package.zip")
    for line in package.left_out.told:
        client.tell(line)
    _check_entries(spec, folder)
    return package


def _check_entries(spec: JobSpec, folder: Path) -> None:
    """What the job names in its folder is there, and can be called as its task calls it."""
    if spec.entry:
        trains = spec.task == "train"
        entry_check.check(spec.entry, folder, default="train" if trains else "", call=("ctx",) if trains else ())
    sample = spec.arguments.get("sample_input")
    if spec.task in ("prepare", "benchmark") and isinstance(sample, str) and ":" in sample:
        entry_check.check(sample, folder, "arguments.sample_input", call=("batch_size",))


def to_dict(spec: JobSpec) -> Data:
    """What was written, as JSON-like data: defaults stay out, so that a stored spec reads as its author wrote it."""
    return spec.model_dump(mode="json", exclude_unset=True)

"""Resources of each configuration of a Triton kernel, compiled without a device, and whether it may be launched.

A configuration that spills registers, or needs more threads or shared memory than a program may have, is never
launched: triton_table.py contains none, sources/resources.json has the numbers for the current sources, and
drivers/triton_launch.py checks them before a launch. Imports neither torch nor Triton: compilers run in separate
processes.
"""

import json
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cluster.errors import UserError, nearest
from cluster.paths import home, private_dir
from workers.errors import KernelsUnavailable
from workers.kernels.compilation import triton_compile
from workers.kernels.compilation import triton_table as table
from workers.kernels.compilation.triton_compilers import compile_jobs
from workers.kernels.compilation.triton_table import CompileTarget, Config

SOURCES: Path = Path(__file__).parents[1] / "sources"
DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2}
NUMBERS = ("registers", "spills", "shared_bytes")
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class KernelResources:
    """A configuration compiled for a target. `refused`: why it must not be launched, or ""."""

    target: str
    dtype: str
    config: Config
    registers: int = 0
    spills: int = 0
    shared_bytes: int = 0
    refused: str = ""

    @property
    def threads(self) -> int:
        return self.config.warps * table.target(self.target).lanes

    def to_plain(self) -> dict[str, Any]:
        """Return plain data, as the command line prints it."""
        form = {"kernel": self.config.kernel, "configuration": str(self.config), "threads": self.threads}
        return {key: value for key, value in asdict(self).items() if key != "config"} | form


def refusal_reason(
    config: Config, on: CompileTarget, registers: int = 0, spills: int = 0, shared_bytes: int = 0
) -> str:
    """Compare a configuration's numbers with a target's limits. Return why it must not be launched, or ""."""
    threads = config.warps * on.lanes
    if threads > on.threads:
        return f"{threads} threads; {on.name} allows {on.threads} per program"
    if reason := on.refusal_reason(registers, spills, shared_bytes):
        return reason
    if config.ctas > (table.MAX_CLUSTER_SIZE if on.clusters else 1):
        return f"a cluster of {config.ctas}; {on.name} allows {table.MAX_CLUSTER_SIZE if on.clusters else 'none'}"
    return ""


def compile_report(
    targets: Sequence[str], progress: Progress | None = None, kernels: Collection[str] = ()
) -> list[KernelResources]:
    """Compile, with the installed Triton, every configuration that the table may launch on `targets`.

    `kernels` limits them to these kernels. `progress(done, total)` is called after each. Raises UserError for an
    unknown target or kernel, KernelsUnavailable without Triton.
    """
    for name in kernels:
        if name not in table.KERNELS:
            raise UserError(f"unknown kernel {name!r}", nearest(name, tuple(table.KERNELS)))
    jobs = launchable_configurations(targets, major_minor(installed()))
    return compile_configurations([job for job in jobs if not kernels or job.config.kernel in kernels], progress)


def launchable_configurations(targets: Sequence[str], triton: tuple[int, int]) -> list[KernelResources]:
    """List the configurations that the table may launch with a version of Triton, not yet compiled."""
    return [
        KernelResources(on.name, dtype, config)
        for on in map(_compilable, dict.fromkeys(targets))
        for dtype, itemsize in DTYPES.items()
        for config in table.configs(on, itemsize, triton)
    ]


def compile_configurations(jobs: Sequence[KernelResources], progress: Progress | None = None) -> list[KernelResources]:
    """Compile configurations and add their numbers, reusing results for the same source and Triton."""
    release, stored = installed(), _read_cache()
    keys = {job: key_of(job, release) for job in jobs}
    numbers = {job: stored[key] for job, key in keys.items() if key in stored}
    report_progress = progress or (lambda done, of: None)
    report_progress(len(numbers), len(keys))
    lacking = [job for job in keys if job not in numbers]
    for number, reply in compile_jobs([{"target": j.target, "dtype": j.dtype, **asdict(j.config)} for j in lacking]):
        job = lacking[number]
        numbers[job] = reply
        _cache_result(keys[job], reply)
        report_progress(len(numbers), len(keys))
    return [check_limits(job, numbers[job]) for job in jobs]


def refused_rows(rows: Iterable[KernelResources]) -> list[KernelResources]:
    """Return those that must not be launched: they spill, exceed a limit, or do not compile."""
    return [row for row in rows if row.refused]


def check_limits(row: KernelResources, reply: dict[str, Any]) -> KernelResources:
    if "error" in reply:
        return replace(row, refused=f"does not compile: {reply['error']}")
    registers, spills, shared = (int(reply[name]) for name in NUMBERS)
    refused = refusal_reason(row.config, table.target(row.target), registers, spills, shared)
    return replace(row, registers=registers, spills=spills, shared_bytes=shared, refused=refused)


def installed() -> str:
    """Return the version of Triton. Raises KernelsUnavailable if it is not installed."""
    try:
        return version("triton")
    except PackageNotFoundError:
        raise KernelsUnavailable("triton", "Triton is not installed", "pip install triton==3.7.1") from None


def source_hash(module: str) -> str:
    """Hash the file in sources/ that is compiled."""
    return sha256((SOURCES / f"{module}.py").read_bytes()).hexdigest()[:16]


@cache
def _compiler_hash() -> str:
    return sha256(Path(triton_compile.__file__).read_bytes()).hexdigest()[:16]


def source_hashes() -> dict[str, str]:
    return {module: source_hash(module) for module, _ in dict.fromkeys(table.KERNELS.values())}


def key_of(row: KernelResources, release: str) -> str:
    """Key of a cached result: everything it depends on, including the programs that the table selects."""
    on = table.target(row.target)
    programs = sha256(repr(triton_compile.variants(row.config, row.dtype, on)).encode()).hexdigest()[:8]
    made_by = f"{release} {source_hash(row.config.module)} {_compiler_hash()} {programs}"
    return f"{made_by} {row.target} {row.dtype} {row.config}"


def major_minor(release: str) -> tuple[int, int]:
    major, minor = release.split(".")[:2]
    return int(major), int(minor)


def _compilable(name: str) -> CompileTarget:
    on = table.target(name)
    if on.vendor == "intel":
        raise UserError(f"only the driver of target {name!r} can report its registers", "use a target of NVIDIA or AMD")
    return on


# Cache of earlier results: lines in POLYFLEET_HOME


def _cache() -> Path:
    return home() / "measured" / "kernel-resources.jsonl"


def _read_cache() -> dict[str, dict[str, Any]]:
    """Read the cached results. Truncated lines are skipped; an unreadable file counts as empty."""
    stored: dict[str, dict[str, Any]] = {}
    try:
        lines = _cache().read_text(errors="replace").splitlines()
    except OSError:
        return {}
    for line in lines:
        try:
            value = json.loads(line)
            stored[value["key"]] = {name: int(value[name]) for name in NUMBERS}
        except (ValueError, TypeError, KeyError):
            continue
    return stored


def _cache_result(key: str, reply: dict[str, Any]) -> None:
    """Cache a result. A full disk loses the line but not the report."""
    if "error" in reply:
        return
    try:
        private_dir(_cache().parent)
        with _cache().open("a") as file:
            file.write(json.dumps({"key": key, **reply}) + "\n")
    except (OSError, UserError):
        return


if __name__ == "__main__":
    from workers.kernels.compilation.triton_committed import write

    write(sys.argv[1:] or table.COMMITTED)

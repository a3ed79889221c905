"""What each configuration of a Triton kernel takes of a device, compiled without one, and whether it may be launched.

A configuration that spills registers, or wants more threads or shared memory than a program may have, is never
launched: the table in parts/triton_table.py holds none, sources/resources.json proves it for the sources as they are,
and parts/triton_launch.py looks there. Imports neither torch nor Triton: compilers run in processes of their own.
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
from workers.kernels.parts import triton_compile
from workers.kernels.parts import triton_table as table
from workers.kernels.parts.triton_compilers import compiled
from workers.kernels.parts.triton_table import Config, Target

SOURCES = Path(__file__).parent / "sources"
DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2}
NUMBERS = ("registers", "spills", "shared_bytes")
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Resources:
    """A configuration compiled for a target. `refused`: why it may not be launched, "" when it may."""

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
        """Plain data, as the command line prints it."""
        form = {"kernel": self.config.kernel, "configuration": str(self.config), "threads": self.threads}
        return {key: value for key, value in asdict(self).items() if key != "config"} | form


def allowed(config: Config, on: Target, registers: int = 0, spills: int = 0, shared_bytes: int = 0) -> str:
    """Why a configuration is not launched on a target, "" where it is: its numbers against the target's."""
    threads = config.warps * on.lanes
    if threads > on.threads:
        return f"{threads} threads, {on.name} has {on.threads} for a program"
    if spills:
        return f"spills {spills} registers"
    if registers > on.registers:
        return f"{registers} registers a thread, {on.name} has {on.registers}"
    if shared_bytes > on.shared_bytes:
        return f"{shared_bytes} bytes of shared memory, {on.name} has {on.shared_bytes} for a program"
    if config.ctas > (table.MOST_IN_CLUSTER if on.clusters else 1):
        return f"a cluster of {config.ctas}, {on.name} has {table.MOST_IN_CLUSTER if on.clusters else 'none'}"
    return ""


def report(targets: Sequence[str], progress: Progress | None = None, kernels: Collection[str] = ()) -> list[Resources]:
    """Every configuration that the table may launch on `targets`, compiled by the Triton that is installed; of
    `kernels` alone where some are named.

    `progress(done, all)` is called after each. Raises UserError for an unknown target or kernel, KernelsUnavailable
    without Triton.
    """
    for name in kernels:
        if name not in table.KERNELS:
            raise UserError(f"unknown kernel {name!r}", nearest(name, tuple(table.KERNELS)))
    jobs = launchable(targets, major_minor(installed()))
    return measured([job for job in jobs if not kernels or job.config.kernel in kernels], progress)


def launchable(targets: Sequence[str], triton: tuple[int, int]) -> list[Resources]:
    """What the table may launch with a version of Triton, not yet compiled."""
    return [
        Resources(on.name, dtype, config)
        for on in map(_compilable, dict.fromkeys(targets))
        for dtype, itemsize in DTYPES.items()
        for config in table.configs(on, itemsize, triton)
    ]


def measured(jobs: Sequence[Resources], progress: Progress | None = None) -> list[Resources]:
    """The same with their numbers. What was compiled of the same source before, by the same Triton, is not again."""
    release, known = installed(), _remembered()
    keys = {job: key_of(job, release) for job in jobs}
    found = {job: known[key] for job, key in keys.items() if key in known}
    tell = progress or (lambda done, of: None)
    tell(len(found), len(keys))
    lacking = [job for job in keys if job not in found]
    for number, told in compiled([{"target": j.target, "dtype": j.dtype, **asdict(j.config)} for j in lacking]):
        job = lacking[number]
        found[job] = told
        _remember(keys[job], told)
        tell(len(found), len(keys))
    return [judged(job, found[job]) for job in jobs]


def spilling(rows: Iterable[Resources]) -> list[Resources]:
    """Those that may not be launched: they spill, exceed a limit, or do not compile."""
    return [row for row in rows if row.refused]


def judged(row: Resources, told: dict[str, Any]) -> Resources:
    if "error" in told:
        return replace(row, refused=f"does not compile: {told['error']}")
    registers, spills, shared = (int(told[name]) for name in NUMBERS)
    refused = allowed(row.config, table.target(row.target), registers, spills, shared)
    return replace(row, registers=registers, spills=spills, shared_bytes=shared, refused=refused)


def installed() -> str:
    """The release of Triton. Raises KernelsUnavailable without one."""
    try:
        return version("triton")
    except PackageNotFoundError:
        raise KernelsUnavailable("triton", "Triton is not installed", "pip install triton==3.7.1") from None


def source_hash(module: str) -> str:
    """Of the text that is compiled: of one file of sources/."""
    return sha256((SOURCES / f"{module}.py").read_bytes()).hexdigest()[:16]


@cache
def _compiler_hash() -> str:
    return sha256(Path(triton_compile.__file__).read_bytes()).hexdigest()[:16]


def source_hashes() -> dict[str, str]:
    return {module: source_hash(module) for module, _ in dict.fromkeys(table.KERNELS.values())}


def key_of(row: Resources, release: str) -> str:
    """Also which programs are compiled for it, which the table decides."""
    on = table.target(row.target)
    programs = sha256(repr(triton_compile.variants(row.config, row.dtype, on)).encode()).hexdigest()[:8]
    made_by = f"{release} {source_hash(row.config.module)} {_compiler_hash()} {programs}"
    return f"{made_by} {row.target} {row.dtype} {row.config}"


def major_minor(release: str) -> tuple[int, int]:
    major, minor = release.split(".")[:2]
    return int(major), int(minor)


def _compilable(name: str) -> Target:
    on = table.target(name)
    if on.vendor == "intel":
        raise UserError(f"registers of target {name!r} are known to its driver alone", "give one of NVIDIA or AMD")
    return on


# What was compiled before: lines in POLYFLEET_HOME


def _cache() -> Path:
    return home() / "measured" / "kernel-resources.jsonl"


def _remembered() -> dict[str, dict[str, Any]]:
    """A line that was cut short is passed over, and what cannot be read counts for nothing."""
    found: dict[str, dict[str, Any]] = {}
    try:
        lines = _cache().read_text(errors="replace").splitlines()
    except OSError:
        return {}
    for line in lines:
        try:
            value = json.loads(line)
            found[value["key"]] = {name: int(value[name]) for name in NUMBERS}
        except (ValueError, TypeError, KeyError):
            continue
    return found


def _remember(key: str, told: dict[str, Any]) -> None:
    """A full disk costs the line, not the report."""
    if "error" in told:
        return
    try:
        private_dir(_cache().parent)
        with _cache().open("a") as file:
            file.write(json.dumps({"key": key, **told}) + "\n")
    except (OSError, UserError):
        return


if __name__ == "__main__":
    from workers.kernels.parts.triton_committed import write

    write(sys.argv[1:] or table.COMMITTED)

"""Which libraries ranks have here and what their torch was built for, read from files: nothing is imported."""

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from cluster.catalogue import Vendor, vendor
from cluster.types import Device, Finding
from cluster.version import VERSION
from workers import interpreter


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The toolkits a torch wheel was built for, "" for those it was not."""

    cuda: str = ""
    hip: str = ""
    xpu: str = ""

    def __str__(self) -> str:
        """`CUDA 12.8`, or `CPUs only`."""
        named = (("CUDA", self.cuda), ("ROCm", self.hip), ("XPU", self.xpu))
        return " and ".join(f"{name} {number}" for name, number in named if number) or "CPUs only"


def versions() -> dict[str, str]:
    """Python, Polyfleet, and those of DISTRIBUTIONS that are installed, where ranks run; Ray's is that of the node."""
    if not interpreter.is_own():
        told = interpreter.told()
        return {"python": told.python or "?", "polyfleet": VERSION, **told.versions, "ray": version("ray")}
    found = {"python": platform.python_version(), "polyfleet": VERSION}
    for name in interpreter.DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def torch_build() -> TorchBuild | None:
    """None without torch. torch/version.py holds lines like `cuda: Optional[str] = '12.8'`."""
    if interpreter.is_own():
        spec = find_spec("torch")
        file = spec.origin if spec else None
    else:
        file = interpreter.told().torch
    if not file:
        return None
    text = (Path(file).parent / "version.py").read_text()
    values = dict(re.findall(r"^(cuda|hip|xpu)\b[^=]*=\s*'([^']*)'", text, re.MULTILINE))
    return TorchBuild(**values)


def mismatches(devices: Sequence[Device], installed: dict[str, str], build: TorchBuild | None) -> list[Finding]:
    """Hardware this environment's torch cannot use, and extensions built for another torch."""
    if build is None:
        return []
    kinds: dict[str, list[str]] = {}
    for device in devices:
        if not device.emulated and not device.unavailable_reason:
            kinds.setdefault(device.backend, []).append(device.kind)
    torch = f"torch {installed.get('torch', '?')} in this environment is built for {build}"
    rows = {backend: vendor(backend) for backend in kinds}
    wrong = [
        _wrong_build(b, kinds[b], torch if row.torch_build else f"this environment has no {' or '.join(row.packages)}")
        for b, row in rows.items()
        if not _fits(row, build, installed)
    ]
    return wrong + [f for name in ("torch-xla", "intel-extension-for-pytorch") if (f := _wrong_pair(name, installed))]


def _fits(row: Vendor, build: TorchBuild, installed: dict[str, str]) -> bool:
    """A vendor that needs neither a toolkit in torch nor a package fits every torch."""
    if row.torch_build and getattr(build, row.torch_build, ""):
        return True
    return any(name in installed for name in row.packages) or not (row.torch_build or row.packages)


def _wrong_build(backend: str, kinds: list[str], problem: str) -> Finding:
    return Finding(
        "error", backend, f"{', '.join(dict.fromkeys(kinds))} found, but {problem}",
        f"give the pool an environment with the {backend!r} extra",
    )  # fmt: skip


def _wrong_pair(name: str, installed: dict[str, str]) -> Finding | None:
    """torch-xla and IPEX load only under the torch release they were built with: same first two numbers."""
    if name not in installed or "torch" not in installed or _minor(installed[name]) == _minor(installed["torch"]):
        return None
    return Finding(
        "error", name, f"{name} {installed[name]} does not load under torch {installed['torch']}",
        f"install torch {_minor(installed[name])} in this environment",
    )  # fmt: skip


def _minor(text: str) -> str:
    return ".".join(text.split(".")[:2])

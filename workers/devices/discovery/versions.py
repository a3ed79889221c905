"""Versions of the libraries that ranks use and the toolkit of their torch, read from files without importing any."""

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
from workers.processes import interpreter


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """Versions of the toolkits that a torch wheel was built for, "" for the others."""

    cuda: str = ""
    hip: str = ""
    xpu: str = ""

    def __str__(self) -> str:
        """Text such as `CUDA 12.8` or `CPUs only`."""
        toolkits = (("CUDA", self.cuda), ("ROCm", self.hip), ("XPU", self.xpu))
        return " and ".join(f"{name} {number}" for name, number in toolkits if number) or "CPUs only"


def versions() -> dict[str, str]:
    """Versions of Python, Polyfleet and installed DISTRIBUTIONS in the ranks' environment; Ray's is the node's."""
    if not interpreter.is_own():
        interpreter_facts = interpreter.describe()
        return {
            "python": interpreter_facts.python or "?",
            "polyfleet": VERSION,
            **interpreter_facts.versions,
            "ray": version("ray"),
        }
    installed = {"python": platform.python_version(), "polyfleet": VERSION}
    for name in interpreter.DISTRIBUTIONS:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def torch_build() -> TorchBuild | None:
    """Toolkits of the installed torch, from lines such as `cuda: Optional[str] = '12.8'` in torch/version.py.

    None without torch.
    """
    if interpreter.is_own():
        spec = find_spec("torch")
        file = spec.origin if spec else None
    else:
        file = interpreter.describe().torch
    if not file:
        return None
    text = (Path(file).parent / "version.py").read_text()
    values = dict(re.findall(r"^(cuda|hip|xpu)\b[^=]*=\s*'([^']*)'", text, re.MULTILINE))
    return TorchBuild(**values)


def mismatches(devices: Sequence[Device], installed: dict[str, str], build: TorchBuild | None) -> list[Finding]:
    """Report hardware that this environment's torch cannot use, and extensions built for another torch."""
    if build is None:
        return []
    kinds: dict[str, list[str]] = {}
    for device in devices:
        if not device.emulated and not device.unavailable_reason:
            kinds.setdefault(device.backend, []).append(device.kind)
    torch = f"torch {installed.get('torch', '?')} in this environment is built for {build}"
    rows = {backend: vendor(backend) for backend in kinds}
    findings = [
        _wrong_build(b, kinds[b], torch if row.torch_build else f"this environment has no {' or '.join(row.packages)}")
        for b, row in rows.items()
        if not _suits_vendor(row, build, installed)
    ]
    return findings + [
        f for name in ("torch-xla", "intel-extension-for-pytorch") if (f := _wrong_pair(name, installed))
    ]


def _suits_vendor(row: Vendor, build: TorchBuild, installed: dict[str, str]) -> bool:
    """Return whether torch suits a vendor. One that needs neither a toolkit nor a package fits every torch."""
    if row.torch_build and getattr(build, row.torch_build, ""):
        return True
    return any(name in installed for name in row.packages) or not (row.torch_build or row.packages)


def _wrong_build(backend: str, kinds: list[str], problem: str) -> Finding:
    return Finding(
        "error", backend, f"{', '.join(dict.fromkeys(kinds))} is present, but {problem}",
        f"give the pool an environment with the {backend!r} extra",
    )  # fmt: skip


def _wrong_pair(name: str, installed: dict[str, str]) -> Finding | None:
    """Report torch-xla or IPEX with another torch: each needs the release it was built with (first two numbers)."""
    if name not in installed or "torch" not in installed or _minor(installed[name]) == _minor(installed["torch"]):
        return None
    return Finding(
        "error", name, f"{name} {installed[name]} does not load under torch {installed['torch']}",
        f"install torch {_minor(installed[name])} in this environment",
    )  # fmt: skip


def _minor(text: str) -> str:
    return ".".join(text.split(".")[:2])

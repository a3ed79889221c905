"""Inputs of discovery: files below a root, environment variables, tools. Tests use recorded trees of other machines."""

import os
import platform
import re
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

TOOL_TIMEOUT_S = 8.0
STORAGE, NETWORK, DISPLAY, BRIDGE = 0x01, 0x02, 0x03, 0x06
"""Classes of PCI functions, the highest byte of their class code. Source: the PCI Code and ID Assignment."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that discovery reads. Paths have no leading slash."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    system: str = field(default_factory=platform.system)

    def path(self, name: str) -> Path:
        return self.root / name

    def text(self, name: str) -> str:
        """Stripped text of a file; "" if it is absent or unreadable."""
        try:
            return self.path(name).read_text(errors="replace").strip()
        except OSError:
            return ""

    def number(self, name: str) -> int | None:
        """Number in a file, decimal or 0x…; None if the file contains no number."""
        try:
            return int(self.text(name), 0)
        except ValueError:
            return None

    def glob(self, pattern: str) -> list[str]:
        """Names below the root that match, in natural order: `card10` after `card9`."""
        return sorted((str(p.relative_to(self.root)) for p in self.root.glob(pattern)), key=natural_key)

    def pci(self, *vendors: int) -> "list[PciDevice]":
        """PCI functions of these vendors, in bus order."""
        folders = self.glob("sys/bus/pci/devices/*")
        return [self._pci(folder) for folder in folders if self.number(f"{folder}/vendor") in vendors]

    def _pci(self, folder: str) -> "PciDevice":
        driver = self.path(f"{folder}/driver")
        numa = self.number(f"{folder}/numa_node")
        return PciDevice(
            address=Path(folder).name,
            vendor=self.number(f"{folder}/vendor") or 0,
            device=self.number(f"{folder}/device") or 0,
            subsystem=self.number(f"{folder}/subsystem_device") or 0,
            pci_class=self.number(f"{folder}/class") or 0,
            driver=driver.resolve().name if driver.exists() else "",
            numa_node=numa if numa is not None and numa >= 0 else None,
        )

    def numa_node(self, pci_address: str) -> int | None:
        """NUMA node of a PCI function; None if the kernel does not know it (-1)."""
        node = self.number(f"sys/bus/pci/devices/{pci_address}/numa_node")
        return node if node is not None and node >= 0 else None

    def may_use(self, name: str) -> bool:
        """Return whether this process may read and write a device file."""
        return os.access(self.path(name), os.R_OK | os.W_OK)

    def visible(self, variable: str) -> list[str] | None:
        """Devices to which an environment variable limits this node; None without a limit, [] for no device."""
        value = self.environ.get(variable)
        if value is None:
            return None
        return [part.strip() for part in value.split(",") if part.strip() not in ("", "-1", "NoDevFiles")]


@dataclass(frozen=True, slots=True)
class PciDevice:
    address: str
    vendor: int
    device: int
    subsystem: int
    pci_class: int
    driver: str
    numa_node: int | None

    @property
    def is_display(self) -> bool:
        """VGA, 3D or display controller (class 03xxxx)."""
        return self.pci_class >> 16 == DISPLAY


def sysfs_address(text: str) -> str:
    """Convert `00000000:3B:00.0` (NVML) or `3b:00.0` (tools) to the kernel's `0000:3b:00.0`; "" if invalid."""
    parts = text.strip().lower().split(":")
    if len(parts) not in (2, 3) or not all(re.fullmatch(r"[0-9a-f.]+", part) for part in parts):
        return ""
    try:
        domain = int(parts[0], 16) if len(parts) == 3 else 0
    except ValueError:
        return ""
    return f"{domain:04x}:{parts[-2]}:{parts[-1]}"


def natural_key(name: str) -> list[tuple[int, str]]:
    """Sort key that compares numbers inside a name by value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _kill_with_all(pid: int) -> None:
    """Kill the session that `pid` leads and its descendants, whose sessions may differ, as those of a probe's tools.

    Suspends each process as soon as it is listed, so that it cannot start another before it is killed.
    """
    suspended: dict[int, psutil.Process] = {}
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        while new := [p for p in (root, *root.children(recursive=True)) if p.pid not in suspended]:
            for process in new:
                suspended[process.pid] = process
                with suppress(psutil.Error):
                    process.suspend()
    for process in suspended.values():
        with suppress(psutil.Error):
            process.kill()
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def tool_output(argv: list[str], environ: Mapping[str, str], timeout_s: float = TOOL_TIMEOUT_S) -> tuple[str, str]:
    """Run a vendor's tool: return (its output, "") or ("", reason). A tool that hangs is killed with its children.

    Output that is not valid text is decoded with replacement characters.
    """
    try:
        child = subprocess.Popen(
            argv,
            env=dict(environ),
            text=True,
            errors="replace",
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as e:
        return "", f"{argv[0]} could not be started: {e.strerror}"
    with child:
        try:
            out, err = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _kill_with_all(child.pid)
            return "", f"{Path(argv[0]).name} did not finish within {timeout_s:g} s"
    if child.returncode:
        last = (err.strip().splitlines() or ["no message"])[-1]
        return "", f"{Path(argv[0]).name} exited with code {child.returncode}: {last}"
    return out, ""

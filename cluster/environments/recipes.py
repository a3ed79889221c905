"""Recipes of environments: requirements, modules that must import, disk space, and supported machines."""

import hashlib
import platform
import sys
import sysconfig
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

GB = 10**9
LOCKS = Path(__file__).parent / "locks"
TORCH_INDEX = "POLYFLEET_TORCH_INDEX"  # variable with the index of torch's CPU builds


@dataclass(frozen=True, slots=True)
class CPUBuild:
    """A package of a recipe for which some indexes have a build for the CPU alone, as version `+cpu`.

    It does not need the packages whose names begin with `without`. Bytes mean the same as in the recipe.
    """

    package: str
    without: tuple[str, ...] = ()
    download_bytes: int = 0
    building_bytes: int = GB // 4


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to create one environment.

    `building_bytes` is the disk needed while it is created, for the environment and the downloaded wheels beside it.
    `download_bytes` is the size of those wheels, 0 if unknown. `elsewhere` are requirements from another index than
    that of pip's settings, which is used for nothing else: (requirement, index).

    `modules` are imported to check that it works. Empty `systems`, `machines` and `pythons` mean any.
    """

    name: str
    requirements: str
    modules: tuple[str, ...] = ()
    building_bytes: int = GB // 4
    systems: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()
    pythons: tuple[tuple[int, int], ...] = ()
    download_bytes: int = 0
    cpu_build: CPUBuild | None = None
    elsewhere: tuple[tuple[str, str], ...] = ()

    @property
    def key(self) -> str:
        """Name of the environment's folder on this machine."""
        return self.key_on(platform.python_implementation(), platform.python_version(), sysconfig.get_platform())

    def key_on(self, implementation: str, python_version: str, platform_tag: str) -> str:
        """Return the name of its folder on a machine with that Python.

        Another lock, Python or platform is another environment.
        """
        parts = (self.requirements, implementation, python_version, platform_tag)
        return f"{self.name}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:12]}"

    @property
    def packages(self) -> tuple[str, ...]:
        """The requirements, one each, without comments."""
        lines = (line.split("#")[0].strip() for line in self.requirements.splitlines())
        return tuple(line for line in lines if line)

    @property
    def for_cpu(self) -> "Recipe | None":
        """The recipe with the CPU build of its package, or None. By its key it is another environment."""
        if (cpu := self.cpu_build) is None:
            return None
        lines = [line for line in self.requirements.splitlines() if not (cpu.without and line.startswith(cpu.without))]
        pinned = [f"{line}+cpu" if line.startswith(f"{cpu.package}==") else line for line in lines]
        return replace(
            self,
            requirements="\n".join(pinned) + "\n",
            download_bytes=cpu.download_bytes,
            building_bytes=cpu.building_bytes,
            cpu_build=None,
        )

    @property
    def variants(self) -> "tuple[Recipe, ...]":
        """This recipe and the one with the CPU build. Only one of them needs to be installed."""
        return (self, self.for_cpu) if self.for_cpu else (self,)

    @property
    def download_summary(self) -> str:
        """What will be downloaded and how much, as far as the recipe states it."""
        size = f"needs {self.building_bytes / GB:.1f} GB of free disk"
        if self.download_bytes:
            size = f"downloads about {self.download_bytes / GB:.1f} GB, {size} while it is created"
        sources = {requirement: f" from {urlsplit(index).hostname}" for requirement, index in self.elsewhere}
        notes = [
            f"{requirement}{sources.get(requirement, '')}"
            for requirement in self.packages
            if requirement.endswith("+cpu")
        ]
        if self.cpu_build:
            notes = [f"no CPU build of {self.cpu_build.package} was found"]
        return "; ".join([size, *notes])

    def unsupported_reason(self) -> str:
        """Return why it cannot exist on this machine; "" if it can."""
        system, machine, python = platform.system(), platform.machine(), sys.version_info[:2]
        if (self.systems and system not in self.systems) or (self.machines and machine not in self.machines):
            supported = f"{'/'.join(self.systems)} on {'/'.join(self.machines)}"
            return f"its packages exist for {supported} only; this is {system} on {machine}"
        if self.pythons and python not in self.pythons:
            low, high = (".".join(map(str, version)) for version in (self.pythons[0], self.pythons[-1]))
            return f"its packages exist for Python {low} to {high} only; this is {python[0]}.{python[1]}"
        return ""


def from_plain(plain: dict[str, Any]) -> Recipe:
    """Return the recipe from `dataclasses.asdict`, also after JSON.

    Works without pydantic, which hosts lack at first.
    """
    cpu = plain["cpu_build"]
    values = {name: _frozen(value) for name, value in plain.items()}
    return Recipe(**values | {"cpu_build": CPUBuild(**{k: _frozen(v) for k, v in cpu.items()}) if cpu else None})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def built_in() -> dict[str, Recipe]:
    """Return the environments that come with Polyfleet, by name."""
    return {
        recipe.name: recipe
        for recipe in (
            Recipe(
                "main",
                _lock("main"),
                ("ray", "torch", "safetensors", "pydantic"),
                12 * GB if _cuda_wheels() else 3 * GB,
            ),
            Recipe(
                "xla",
                _lock("xla"),
                ("torch", "torch_xla", "intel_extension_for_pytorch", "ray", "safetensors", "psutil", "pydantic"),
                13 * GB,
                systems=("Linux",),
                machines=("x86_64",),
                pythons=((3, 11), (3, 12), (3, 13)),
                download_bytes=4_200_000_000,
                cpu_build=CPUBuild("torch", ("nvidia-", "triton=="), 500_000_000, 3 * GB),
            ),
        )
    }


NAMES = tuple(sorted(path.stem for path in LOCKS.glob("*.txt")))


# Packages that our own code on a node needs beside the pool's packages.
NODE_PACKAGES = (
    "numpy>=1.26,<3",
    "psutil>=5.9,<8",
    "pydantic>=2.7,<3",
    "pydantic-settings>=2.3,<3",
    "pyyaml>=6,<7",
    "fsspec>=2024.6,<2028",
    "safetensors>=0.6,<1",
    "xxhash>=3.4,<5",
)


def from_requirements(requirements: tuple[str, ...]) -> Recipe:
    """Return the recipe of a pool that lists its own requirements.

    The packages of a node are added, with exactly our version of Ray. The pool's requirements come first: pip stops at
    the first that it cannot find, which is then the user's mistake.
    """
    lines = [*sorted(set(requirements)), *NODE_PACKAGES, f"ray=={version('ray')}"]
    return Recipe(
        "requirements", "\n".join(lines) + "\n", ("ray", "safetensors", "psutil", "pydantic_settings"), 2 * GB
    )


def node_recipe() -> Recipe:
    """Return the smallest environment for nodes, for pools whose Python has no Ray."""
    return replace(from_requirements(()), name="node")


def _lock(name: str) -> str:
    return (LOCKS / f"{name}.txt").read_text()


def _cuda_wheels() -> bool:
    """Return whether torch's wheel comes with the CUDA libraries, as on Linux."""
    return platform.system() == "Linux"

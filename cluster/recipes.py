"""What an environment is made of: requirements, what must import afterwards, disk it takes, machines it exists for."""

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
TORCH_INDEX = "POLYFLEET_TORCH_INDEX"  # the variable that names where torch for the CPU is looked for


@dataclass(frozen=True, slots=True)
class CPUBuild:
    """A package of a recipe that some indexes also have built for the CPU alone, as version `+cpu`.

    It needs none of the packages whose names begin with `without`. Bytes are as those of the recipe.
    """

    package: str
    without: tuple[str, ...] = ()
    download_bytes: int = 0
    building_bytes: int = GB // 4


@dataclass(frozen=True, slots=True)
class Recipe:
    """`building_bytes` is the disk needed while it is made: the environment and, beside it, the downloaded wheels.
    `download_bytes` are those wheels', 0 where nobody has added them up. `elsewhere` are requirements that come from
    another index than pip's settings name, which is asked for nothing else: (requirement, index).

    `modules` are imported as the proof that it works. Empty `systems` and `machines` mean any, as do zero `pythons`.
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
        """Name of its folder on this machine."""
        return self.key_on(platform.python_implementation(), platform.python_version(), sysconfig.get_platform())

    def key_on(self, implementation: str, python_version: str, platform_tag: str) -> str:
        """Name of its folder on a machine with that Python: another lock, Python or platform is another environment."""
        parts = (self.requirements, implementation, python_version, platform_tag)
        return f"{self.name}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:12]}"

    @property
    def packages(self) -> tuple[str, ...]:
        """Its requirements, one each, comments left out."""
        lines = (line.split("#")[0].strip() for line in self.requirements.splitlines())
        return tuple(line for line in lines if line)

    @property
    def for_cpu(self) -> "Recipe | None":
        """The same with that package built for the CPU: another environment, by its key. None where there is none."""
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
        """Itself, and built for the CPU: where one is there, nobody needs the other."""
        return (self, self.for_cpu) if self.for_cpu else (self,)

    @property
    def extent(self) -> str:
        """What will be downloaded, and how much, as far as it is known before."""
        size = f"needs {self.building_bytes / GB:.1f} GB of free disk"
        if self.download_bytes:
            size = f"downloads about {self.download_bytes / GB:.1f} GB, {size} while it is made"
        places = {one: f" from {urlsplit(index).hostname}" for one, index in self.elsewhere}
        told = [f"{one}{places.get(one, '')}" for one in self.packages if one.endswith("+cpu")]
        if self.cpu_build:
            told = [f"no index that was asked has {self.cpu_build.package} built for the CPU alone"]
        return "; ".join([size, *told])

    def unsupported(self) -> str:
        """Why it cannot exist on this machine, "" when it can."""
        system, machine, python = platform.system(), platform.machine(), sys.version_info[:2]
        if (self.systems and system not in self.systems) or (self.machines and machine not in self.machines):
            wanted = f"{'/'.join(self.systems)} on {'/'.join(self.machines)}"
            return f"its packages exist for {wanted} only; this is {system} on {machine}"
        if self.pythons and python not in self.pythons:
            low, high = (".".join(map(str, version)) for version in (self.pythons[0], self.pythons[-1]))
            return f"its packages exist for Python {low} to {high} only; this is {python[0]}.{python[1]}"
        return ""


def from_plain(plain: dict[str, Any]) -> Recipe:
    """What `dataclasses.asdict` made of a recipe, also after JSON: hosts that follow it have no pydantic yet."""
    cpu = plain["cpu_build"]
    own = {name: _frozen(value) for name, value in plain.items()}
    return Recipe(**own | {"cpu_build": CPUBuild(**{k: _frozen(v) for k, v in cpu.items()}) if cpu else None})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def built_in() -> dict[str, Recipe]:
    """The environments that come with Polyfleet, by name."""
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


# What our own code on a node needs beside the pool's packages.
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
    """An environment for a pool that lists its own; what a node needs is added, Ray in exactly our version.

    The pool's come first: pip stops at the first it cannot find, and that should be the user's mistake.
    """
    lines = [*sorted(set(requirements)), *NODE_PACKAGES, f"ray=={version('ray')}"]
    return Recipe(
        "requirements", "\n".join(lines) + "\n", ("ray", "safetensors", "psutil", "pydantic_settings"), 2 * GB
    )


def of_nodes() -> Recipe:
    """What nodes run from whose pool's Python has no Ray: as little as that."""
    return replace(from_requirements(()), name="node")


def _lock(name: str) -> str:
    return (LOCKS / f"{name}.txt").read_text()


def _cuda_wheels() -> bool:
    """On Linux torch's wheel brings the CUDA libraries along."""
    return platform.system() == "Linux"

"""What an environment is made of: requirements, what must import afterwards, disk it takes, machines it exists for."""

import hashlib
import platform
import re
import sys
import sysconfig
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

GB = 10**9
LOCKS = Path(__file__).parent / "locks"


@dataclass(frozen=True, slots=True)
class Recipe:
    """`building_bytes` is the disk needed while it is made: the environment and, beside it, the downloaded wheels.

    `modules` are imported as the proof that it works. Empty `systems` and `machines` mean any, as do zero `pythons`.
    """

    name: str
    requirements: str
    modules: tuple[str, ...] = ()
    building_bytes: int = GB // 4
    systems: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()
    pythons: tuple[tuple[int, int], ...] = ()

    @property
    def key(self) -> str:
        """Name of its folder: another lock, Python or platform is another environment."""
        parts = (
            self.requirements,
            platform.python_implementation(),
            platform.python_version(),
            sysconfig.get_platform(),
        )
        return f"{self.name}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:12]}"

    @property
    def packages(self) -> tuple[str, ...]:
        """Its requirements, one each, comments left out."""
        lines = (line.split("#")[0].strip() for line in self.requirements.splitlines())
        return tuple(line for line in lines if line)

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
            ),
        )
    }


NAMES = tuple(sorted(path.stem for path in LOCKS.glob("*.txt")))


# What our own code on a node needs beside the pool's packages.
NODE_PACKAGES = (
    "numpy>=1.26,<3",
    "psutil>=5.9,<8",
    "pydantic>=2.7,<3",
    "pyyaml>=6,<7",
    "fsspec>=2024.6,<2028",
    "safetensors>=0.6,<1",
    "xxhash>=3.4,<5",
)


def of_requirements(requirements: tuple[str, ...]) -> Recipe:
    """An environment for a pool that lists its own; what a node needs is added, Ray in exactly our version.

    The pool's come first: pip stops at the first it cannot find, and that should be the user's mistake.
    """
    lines = [*sorted(set(requirements)), *NODE_PACKAGES, f"ray=={version('ray')}"]
    return Recipe("requirements", "\n".join(lines) + "\n", ("ray", "safetensors", "psutil", "pydantic"), 2 * GB)


def plain_requirement(text: str) -> bool:
    """Whether `text` names a package: no option of pip's, no file of further requirements, one line."""
    return re.fullmatch(r"[A-Za-z0-9][^\n\r\0]{0,500}", text) is not None


def _lock(name: str) -> str:
    return (LOCKS / f"{name}.txt").read_text()


def _cuda_wheels() -> bool:
    """On Linux torch's wheel brings the CUDA libraries along."""
    return platform.system() == "Linux"

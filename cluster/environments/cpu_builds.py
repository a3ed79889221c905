"""Find the CPU build of a package: with pip's own settings, or at PyTorch's index of CPU builds.

On Linux the torch of the default index comes with CUDA's libraries: eight times the download. Only the page that lists
the versions is read, with short limits; without a response there is no such build. POLYFLEET_TORCH_INDEX names another
index than PyTorch's; set it to nothing to query none.
"""

import os
import re
import subprocess
import sys
from dataclasses import replace

from cluster.environments.environment_install import NOT_INHERITED, has_pip
from cluster.environments.recipes import TORCH_INDEX, Recipe

PYTORCH = "https://download.pytorch.org/whl/cpu"
REPLY_TIMEOUT_S, LIMIT_S = 3, 10


def resolve_cpu_build(recipe: Recipe) -> Recipe:
    """Return the recipe with its CPU build if pip can find one, else the recipe itself.

    Takes seconds at most.
    """
    variant = recipe.for_cpu
    if variant is None or not has_pip():
        return recipe
    requirement = next(line for line in variant.packages if line.endswith("+cpu"))
    if _is_listed(requirement):
        return variant
    index = os.environ.get(TORCH_INDEX, PYTORCH)
    return replace(variant, elsewhere=((requirement, index),)) if index and _is_listed(requirement, index) else recipe


def _is_listed(requirement: str, index: str = "") -> bool:
    """Return whether pip finds exactly this version for this Python and platform."""
    package, _, version = requirement.partition("==")
    index_settings = {"PIP_INDEX_URL": index} if index else {}
    limits = ("--retries=0", f"--timeout={REPLY_TIMEOUT_S}", "--disable-pip-version-check", "--no-input")
    command = [sys.executable, "-m", "pip", "index", "versions", package, *limits]
    try:
        pip = subprocess.run(
            command,
            env={k: v for k, v in os.environ.items() if k not in NOT_INHERITED} | index_settings,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return version in re.findall(r"[^\s,]+", pip.stdout.partition("Available versions:")[2])

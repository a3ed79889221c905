"""Where a package's build for the CPU can be had: by pip's own settings, or at PyTorch's index for it.

On Linux the torch of the default index brings CUDA's libraries along: eight times the download. Only the page that
lists the versions is read, with short limits; where no answer comes, there is no such build. POLYFLEET_TORCH_INDEX
names another index than PyTorch's, and is empty to have none asked.
"""

import os
import re
import subprocess
import sys
from dataclasses import replace

from cluster.environment_install import NOT_INHERITED, has_pip
from cluster.recipes import TORCH_INDEX, Recipe

PYTORCH = "https://download.pytorch.org/whl/cpu"
ANSWER_S, LIMIT_S = 3, 10


def resolve_cpu_build(recipe: Recipe) -> Recipe:
    """The recipe with its CPU build where one can be had, else the recipe itself. Takes seconds at most."""
    variant = recipe.for_cpu
    if variant is None or not has_pip():
        return recipe
    wanted = next(line for line in variant.packages if line.endswith("+cpu"))
    if _lists(wanted):
        return variant
    index = os.environ.get(TORCH_INDEX, PYTORCH)
    return replace(variant, elsewhere=((wanted, index),)) if index and _lists(wanted, index) else recipe


def _lists(requirement: str, index: str = "") -> bool:
    """Whether pip finds this very version for this Python and platform."""
    package, _, version = requirement.partition("==")
    named = {"PIP_INDEX_URL": index} if index else {}
    quick = ("--retries=0", f"--timeout={ANSWER_S}", "--disable-pip-version-check", "--no-input")
    command = [sys.executable, "-m", "pip", "index", "versions", package, *quick]
    try:
        done = subprocess.run(
            command,
            env={k: v for k, v in os.environ.items() if k not in NOT_INHERITED} | named,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return version in re.findall(r"[^\s,]+", done.stdout.partition("Available versions:")[2])

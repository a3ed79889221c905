"""What this build of torch says of itself."""

import re
from functools import cache


@cache
def configuration() -> str:
    import torch

    return torch.__config__.show()


def flags(names: tuple[str, ...]) -> list[str]:
    """`USE_MKL=ON` for each of the names that the build settings have."""
    return [f"{name}={found[1]}" for name in names if (found := re.search(rf"\b{name}=([^,\s]*)", configuration()))]


def release(pattern: str) -> str:
    """The first group of a pattern in the configuration, "" without."""
    found = re.search(pattern, configuration())
    return found[1] if found else ""

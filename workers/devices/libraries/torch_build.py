"""Build settings of the installed torch."""

import re
from functools import cache


@cache
def configuration() -> str:
    import torch

    return torch.__config__.show()


def flags(names: tuple[str, ...]) -> list[str]:
    """Return `NAME=value`, such as `USE_MKL=ON`, for each of `names` in the build settings."""
    return [f"{name}={match[1]}" for name in names if (match := re.search(rf"\b{name}=([^,\s]*)", configuration()))]


def release(pattern: str) -> str:
    """Return the first group of a pattern in the build settings, "" without a match."""
    match = re.search(pattern, configuration())
    return match[1] if match else ""

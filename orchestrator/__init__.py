"""Job specs, the scheduler, the server, the CLI and the Python interface.

Importing this package imports nothing else: each name is imported at its first use, so that the CLI starts quickly.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.api import Orchestrator
    from orchestrator.submission.jobs import (
        BenchmarkJob,
        Candidate,
        JobFailed,
        JobHandle,
        Log,
        LogLine,
        PrepareJob,
        Resources,
        RunJob,
        TrainJob,
    )

__all__ = [
    "BenchmarkJob",
    "Candidate",
    "JobFailed",
    "JobHandle",
    "Log",
    "LogLine",
    "Orchestrator",
    "PrepareJob",
    "Resources",
    "RunJob",
    "TrainJob",
]

_HOME_OF = dict.fromkeys(__all__, "orchestrator.submission.jobs") | {"Orchestrator": "orchestrator.api"}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

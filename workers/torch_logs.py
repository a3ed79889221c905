"""torch's own log lines, kept out while it is made to fail on purpose: the error that is raised tells what they do."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

ABOVE_ALL = logging.CRITICAL + 1


@contextmanager
def silenced() -> Iterator[None]:
    """Inside, neither torch's loggers nor warnings from its modules print. Who set TORCH_LOGS has asked for them.

    Process-wide. Loggers that are made meanwhile inherit it: all others of torch's have a level of their own.
    """
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    known = [logging.getLogger("torch"), *map(logging.getLogger, _names())]
    before = [(logger, logger.level) for logger in known]
    try:
        for logger, level in before:
            if level != logging.NOTSET or logger.name == "torch":
                logger.setLevel(ABOVE_ALL)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\.")
            yield
    finally:
        for logger, level in before:
            logger.setLevel(level)


def _names() -> list[str]:
    return [name for name in logging.root.manager.loggerDict if name.startswith("torch.")]

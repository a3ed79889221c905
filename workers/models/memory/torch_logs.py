"""Silence torch's log lines while it is made to fail on purpose: the raised error contains the same."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

ABOVE_CRITICAL = logging.CRITICAL + 1


@contextmanager
def silence() -> Iterator[None]:
    """Silence torch's loggers and warnings in the block, unless the user has set TORCH_LOGS.

    Process-wide. Loggers that are created inside inherit the level; all existing ones of torch's have their own.
    """
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    loggers = [logging.getLogger("torch"), *map(logging.getLogger, _names())]
    old_levels = [(logger, logger.level) for logger in loggers]
    try:
        for logger, level in old_levels:
            if level != logging.NOTSET or logger.name == "torch":
                logger.setLevel(ABOVE_CRITICAL)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\.")
            yield
    finally:
        for logger, level in old_levels:
            logger.setLevel(level)


def _names() -> list[str]:
    return [name for name in logging.root.manager.loggerDict if name.startswith("torch.")]

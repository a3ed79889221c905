"""The section `libraries` of the configuration, applied to this process."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from cluster.errors import UserError
from workers.config import Given, LibrariesConfig, config_of
from workers.libraries.registry import LIBRARIES, get_library


@contextmanager
def apply(config: Given | LibrariesConfig = None) -> Iterator[None]:
    """Inside, libraries are on and off as configured; then all are as they were.

    `enabled` names all that shall be on: those with a switch that it leaves out are off, those without one stay. Raises
    UserError for an unknown name, for one that is enabled and not here, for one that is disabled and has no switch, and
    when nothing would be left; nothing is switched then.
    """
    given = config if isinstance(config, LibrariesConfig) else config_of(config).libraries
    on, off = parse_config(given)
    with ExitStack() as switched:
        for name in on:
            switched.enter_context(LIBRARIES[name].enable())
        for name in off:
            switched.enter_context(LIBRARIES[name].disable())
        yield


def parse_config(given: LibrariesConfig) -> tuple[list[str], list[str]]:
    """(to switch on, to switch off)."""
    disabled = {get_library(name).name for name in given.disabled}
    listed = None if given.enabled is None else {get_library(name).name for name in given.enabled}
    for name in disabled & (listed or set()):
        raise UserError(f"libraries: {name} is both enabled and disabled", "decide for one")
    for name in listed or ():
        LIBRARIES[name].require()
    for name in disabled:
        if LIBRARIES[name].switch is None:
            told = LIBRARIES[name]._otherwise(False)
            raise UserError(f"libraries.disabled: {name} cannot be switched in a running process", told)
    left = {n for n, library in LIBRARIES.items() if library.available} - disabled
    if not (left if listed is None else listed):
        raise UserError("libraries: none is enabled", "leave at least one")
    switchable = [name for name, library in LIBRARIES.items() if library.switch is not None]
    off = disabled | ({n for n in switchable if n not in listed} if listed is not None else set())
    return [n for n in switchable if n in (listed or ())], [n for n in switchable if n in off]

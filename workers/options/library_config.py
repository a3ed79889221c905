"""Apply the section `libraries` of the configuration to this process."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from cluster.errors import UserError
from workers.devices.libraries.registry import LIBRARIES, get_library
from workers.options.config import ConfigLike, LibrariesConfig, config_of


@contextmanager
def apply(config: ConfigLike | LibrariesConfig = None) -> Iterator[None]:
    """Switch libraries as configured inside a `with`, and restore their states afterwards.

    `enabled` is the complete list: libraries missing from it are switched off, unless they have no switch. Raises
    UserError, without switching any, for an unknown name, for an enabled library that is unavailable, for a disabled
    library without a switch, and if no library would remain.
    """
    section = config if isinstance(config, LibrariesConfig) else config_of(config).libraries
    on, off = parse_config(section)
    with ExitStack() as switched:
        for name in on:
            switched.enter_context(LIBRARIES[name].enable())
        for name in off:
            switched.enter_context(LIBRARIES[name].disable())
        yield


def parse_config(section: LibrariesConfig) -> tuple[list[str], list[str]]:
    """Return (libraries to switch on, libraries to switch off)."""
    disabled = {get_library(name).name for name in section.disabled}
    listed = None if section.enabled is None else {get_library(name).name for name in section.enabled}
    for name in disabled & (listed or set()):
        raise UserError(f"libraries: {name} is both enabled and disabled", "remove it from one of the lists")
    for name in listed or ():
        LIBRARIES[name].require()
    for name in disabled:
        if LIBRARIES[name].switch is None:
            remedy = LIBRARIES[name]._alternative(False)
            raise UserError(f"libraries.disabled: {name} cannot be switched in a running process", remedy)
    remaining = {n for n, library in LIBRARIES.items() if library.available} - disabled
    if not (remaining if listed is None else listed):
        raise UserError("libraries: no library is enabled", "enable at least one")
    switchable = [name for name, library in LIBRARIES.items() if library.switch is not None]
    off = disabled | ({n for n in switchable if n not in listed} if listed is not None else set())
    return [n for n in switchable if n in (listed or ())], [n for n in switchable if n in off]

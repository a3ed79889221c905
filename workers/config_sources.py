"""Where options come from beside arguments: variables of the environment, and a file. A variable that names no option
is an error, as an unknown key of the file is.
"""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource

from cluster.errors import SpecError, UserError, nearest

PREFIX, BETWEEN = "POLYFLEET_CONFIG__", "__"
FILE = "POLYFLEET_CONFIG_FILE"


class EnvironmentSource(PydanticBaseSettingsSource):
    """Variables such as POLYFLEET_CONFIG__CPU__THREADS, in any case; of a section also JSON: POLYFLEET_CONFIG__CPU."""

    def __call__(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for variable in sorted(filter(_ours, os.environ), key=lambda name: (name.count(BETWEEN), name)):
            (*sections, option), options = self._named_by(variable)
            place = found
            for section in sections:
                place = place.setdefault(section, {})
            place[option] = _object(variable) if options else os.environ[variable]
        return found

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Nothing: `__call__` reads all variables at once, those of no field too."""
        return None, field_name, False

    def _named_by(self, variable: str) -> tuple[list[str], type[BaseModel] | None]:
        """The path of the option (cpu, threads), and the options below it where it is a section.

        Raises SpecError, whose field is the variable, for a name that is none.
        """
        if not variable.upper().startswith(PREFIX):
            rest = variable[len(PREFIX.rstrip("_")) :].strip("_").upper() or "CPU__THREADS"
            raise SpecError(variable, "is neither an option nor the file", f"write {PREFIX}{rest}, or {FILE}")
        options: type[BaseModel] | None = self.settings_cls
        path = variable[len(PREFIX) :].lower().split(BETWEEN)
        for part in path:
            if options is None:
                raise SpecError(variable, "an option has no options of its own", f"leave {part.upper()!r} out")
            if part not in options.model_fields:
                known = [name.upper() for name in options.model_fields]
                raise SpecError(variable, f"unknown option {part.upper()!r}", nearest(part.upper(), known))
            options = section_type(options.model_fields[part])
        return path, options


class ConfigFileSource(InitSettingsSource):
    """The configuration file as the source of least weight."""

    def __init__(self, settings_cls: type[BaseSettings]):
        super().__init__(settings_cls, init_kwargs=_read_file())


def section_type(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a section's options; None for a plain option."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def file() -> Path:
    """The configuration file, which need not exist unless POLYFLEET_CONFIG_FILE names it."""
    named = os.environ.get(FILE)
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Path(named) if named else folder / "polyfleet" / "config.toml"


def _ours(variable: str) -> bool:
    """Those that a slip of the pen makes of ours too: POLYFLEET_CONFIG_CPU__THREADS."""
    return variable.upper().startswith(PREFIX.rstrip("_")) and variable.upper() != FILE


def _object(variable: str) -> dict[str, Any]:
    """A whole section in one variable, as JSON."""
    try:
        value = json.loads(os.environ[variable])
    except ValueError:
        value = None
    if not isinstance(value, dict):
        said = f"a section is written as a JSON object (given: {os.environ[variable]!r})"
        raise SpecError(variable, said, f"or set its options one by one: {variable}{BETWEEN}OPTION")
    return value


def _read_file() -> dict[str, Any]:
    try:
        return tomllib.loads(file().read_text())
    except FileNotFoundError:
        if FILE in os.environ:
            raise UserError(f"there is no file {file()}", f"{FILE} names it: write or unset it") from None
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise UserError(f"{file()} cannot be read as TOML: {e}", "see docs/backends for its options") from None

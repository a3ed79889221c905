"""Sources of options besides arguments: environment variables and a file.

A variable that names no option is an error, as is an unknown key in the file.
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

PREFIX, SEPARATOR = "POLYFLEET_CONFIG__", "__"
FILE_VARIABLE = "POLYFLEET_CONFIG_FILE"


class EnvironmentSource(PydanticBaseSettingsSource):
    """Variables such as POLYFLEET_CONFIG__CPU__THREADS, in upper or lower case; or a section as JSON:
    POLYFLEET_CONFIG__CPU.
    """

    def __call__(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for variable in sorted(filter(_is_option, os.environ), key=lambda name: (name.count(SEPARATOR), name)):
            (*sections, option), options = self._named_by(variable)
            target = values
            for section in sections:
                target = target.setdefault(section, {})
            target[option] = _parse_section(variable) if options else os.environ[variable]
        return values

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Return no value: `__call__` reads all variables at once, also those that name no field."""
        return None, field_name, False

    def _named_by(self, variable: str) -> tuple[list[str], type[BaseModel] | None]:
        """Return the path of an option (cpu, threads), and, for a section, the options in it.

        Raises SpecError, with the variable as its field, if the variable names no option.
        """
        if not variable.upper().startswith(PREFIX):
            suffix = variable[len(PREFIX.rstrip("_")) :].strip("_").upper() or "CPU__THREADS"
            raise SpecError(
                variable, "is neither an option nor the name of the file", f"write {PREFIX}{suffix}, or {FILE_VARIABLE}"
            )
        options: type[BaseModel] | None = self.settings_cls
        path = variable[len(PREFIX) :].lower().split(SEPARATOR)
        for part in path:
            if options is None:
                raise SpecError(variable, "an option has no options of its own", f"remove {part.upper()!r}")
            if part not in options.model_fields:
                names = [name.upper() for name in options.model_fields]
                raise SpecError(variable, f"unknown option {part.upper()!r}", nearest(part.upper(), names))
            options = section_type(options.model_fields[part])
        return path, options


class ConfigFileSource(InitSettingsSource):
    """The configuration file, the source with the lowest priority."""

    def __init__(self, settings_cls: type[BaseSettings]):
        super().__init__(settings_cls, init_kwargs=_read_file())


def section_type(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a section's options; None for a plain option."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def config_file() -> Path:
    """Return the path of the configuration file; it may be missing unless POLYFLEET_CONFIG_FILE names it."""
    path = os.environ.get(FILE_VARIABLE)
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Path(path) if path else folder / "polyfleet" / "config.toml"


def _is_option(variable: str) -> bool:
    """Return whether a variable is meant as an option, also if mistyped: POLYFLEET_CONFIG_CPU__THREADS."""
    return variable.upper().startswith(PREFIX.rstrip("_")) and variable.upper() != FILE_VARIABLE


def _parse_section(variable: str) -> dict[str, Any]:
    """Read a section that is JSON in one variable."""
    try:
        value = json.loads(os.environ[variable])
    except ValueError:
        value = None
    if not isinstance(value, dict):
        message = f"a section must be a JSON object (got {os.environ[variable]!r})"
        raise SpecError(variable, message, f"write a JSON object, or set single options: {variable}{SEPARATOR}OPTION")
    return value


def _read_file() -> dict[str, Any]:
    try:
        return tomllib.loads(config_file().read_text())
    except FileNotFoundError:
        if FILE_VARIABLE in os.environ:
            raise UserError(
                f"there is no file {config_file()}", f"{FILE_VARIABLE} names it: create the file, or unset the variable"
            ) from None
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise UserError(f"{config_file()} cannot be read as TOML: {e}", "see docs/backends for its options") from None

"""Fields of a spec as fields of the core's dataclasses, by name.

A field arrives with its own name and value, or as the `CoreForm` of its type says, if the dataclass has that name; no
other field is passed on. `JobSpec.to_job` adds what is computed from several fields. `tests/spec_fields.py` lists for
each field where it arrives, and a test holds the list to be complete.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from sys import intern
from typing import Any

from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class CoreForm:
    """Form in the core of a field whose type is marked with it: `Annotated[Any, CoreForm(duration_s, suffix="_s")]`.

    `convert` changes a value that is set. The name is `name`, or the field's own with `suffix`, which is the unit.
    """

    convert: Callable[[Any], Any] | None = None
    suffix: str = ""
    name: str = ""


Field = tuple[str, str, Callable[[Any], Any] | None]
"""Name in the spec, name in the core, and conversion."""


@cache
def _shared_fields(model: type[BaseModel], core: type) -> tuple[Field, ...]:
    """Return the fields of a spec's model that the dataclass has, too."""
    core_names = {f.name for f in fields(core)}
    return tuple(field for field in _fields(model) if field[1] in core_names)


def _fields(model: type[BaseModel]) -> Iterator[Field]:
    for written, info in model.model_fields.items():
        form = next((note for note in info.metadata if isinstance(note, CoreForm)), CoreForm())
        # Interned, as Python compares names of keyword arguments by identity first: `to_job` takes half the time.
        yield written, intern(form.name or f"{written}{form.suffix}"), form.convert


def core_fields(spec: BaseModel, core: type) -> dict[str, Any]:
    """Return the values of `spec` for the dataclass `core`, by its names. None leaves the default of the dataclass."""
    values: dict[str, Any] = {}
    for written, name, convert in _shared_fields(type(spec), core):
        value = getattr(spec, written)
        if value is not None:
            values[name] = convert(value) if convert else value
    return values


def inherited_fields(specs: Sequence[BaseModel], core: type) -> dict[str, Any]:
    """Return the values for the dataclass `core` of several specs, of which an earlier one overrides later ones.

    Only values that are set override: not None, 0, or empty. Mappings are merged.
    """
    values: dict[str, Any] = {}
    for spec in reversed(specs):
        for written, name, convert in _shared_fields(type(spec), core):
            value = getattr(spec, written)
            if isinstance(value, dict):
                values[name] = values.get(name, {}) | value
            elif value or value is False:
                values[name] = convert(value) if convert else value
    return values

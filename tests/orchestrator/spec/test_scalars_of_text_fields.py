"""Every field of job and fleet files that is text gets a scalar as it is written. The fields are those of the models'
JSON Schemas, so that a new one is tested, too."""

from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from cluster.errors import PolyfleetError
from cluster.fleet.fleet_spec import FleetSpec
from cluster.input.strict_yaml import load
from cluster.input.text_fields import is_text, types_in, types_of
from orchestrator.spec.job_spec import JobSpec

MODELS = {"job": JobSpec, "fleet": FleetSpec}
SCALARS = ("3.10", "02134", "1_000", "on", "2024-01-01", "12e4", "0x1F", "0o17", "true", "1e999", "12:30:00", ".5",
           "+1", ".nan", "9" * 60)  # fmt: skip
KEY = "a-key"
Path = tuple[str | int, ...]


def leaves(schema: dict[str, Any], definitions: dict[str, Any], path: Path = ()) -> Iterator[tuple[Path, str]]:
    """The scalars that a schema allows, each with its type: "" for anything, "enum" for one of several values."""
    if reference := schema.get("$ref", ""):
        schema = definitions[reference.rpartition("/")[2]]
    branches = [(path, branch) for branch in (*schema.get("anyOf", ()), *schema.get("oneOf", ()))]
    branches += [((*path, name), field) for name, field in schema.get("properties", {}).items()]
    branches += [((*path, 0), schema[name]) for name in ("items",) if isinstance(schema.get(name), dict)]
    values = schema.get("additionalProperties")
    branches += [((*path, KEY), values)] if isinstance(values, dict) else []
    if not branches:
        yield path, "enum" if {"enum", "const"} & schema.keys() else schema.get("type", "")
    for inner_path, branch in branches:
        yield from leaves(branch, definitions, inner_path)


def text_fields(model: type[BaseModel]) -> list[Path]:
    """Where a file may have text and no number or truth value."""
    schema = model.model_json_schema()
    types: dict[Path, set[str]] = {}
    for path, type_name in leaves(schema, schema["$defs"]):
        types.setdefault(path, set()).add(type_name)
    return [path for path, names in types.items() if "string" in names and names <= {"string", "null", "enum"}]


def document(path: Path, written: str) -> str:
    for part in reversed(path):
        written = f"[{written}]" if part == 0 else f"{{{part}: {written}}}"
    return written


def value_at(value: Any, path: Path) -> Any:
    for part in path:
        value = value[part]
    return value


@pytest.mark.parametrize("kind", MODELS)
def test_the_text_fields_of_the_schemas_are_found(kind):
    fields = {".".join(map(str, path)) for path in text_fields(MODELS[kind])}
    known = {
        "job": {"name", "command", "command.0", f"env.{KEY}", f"secrets.{KEY}", f"resources.any_of.0.env.{KEY}",
                "resources.ordered.0.node", "data.0.uri", "checkpoint.path", "workload"},
        "fleet": {"name", f"pools.{KEY}.env.{KEY}", f"pools.{KEY}.labels.{KEY}", f"pools.{KEY}.hosts.0",
                  f"pools.{KEY}.hosts.0.host", f"pools.{KEY}.slurm.partition", "kubernetes.image_pull_secrets.0"},
    }  # fmt: skip
    assert known[kind] <= fields and len(fields) > 35


CASES = [(kind, path) for kind, model in MODELS.items() for path in text_fields(model)]


@pytest.mark.parametrize(("kind", "path"), CASES, ids=[f"{kind} {'.'.join(map(str, path))}" for kind, path in CASES])
def test_a_scalar_arrives_as_it_is_written(kind, path):
    wrong = {
        written: value
        for written in SCALARS
        if (value := value_at(load(document(path, written), "f.yaml", MODELS[kind]), path)) != written
    }
    assert wrong == {}


def models_in(model: type[BaseModel], seen: set[type[BaseModel]]) -> set[type[BaseModel]]:
    """The model and all models that its fields have."""
    if model not in seen:
        seen.add(model)
        for field in model.model_fields.values():
            types = types_of(field.annotation, tuple(field.metadata))
            values = [value for type_ in types for value in types_of(getattr(type_, "__args__", (type_,))[-1])]
            for inner in (*types, *types_in(types), *values):
                if isinstance(inner, type) and issubclass(inner, BaseModel):
                    models_in(inner, seen)
    return seen


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_takes_such_a_text_does_not_change_it(kind):
    """Many fields refuse it, because it is not of their form; none makes another text or a number of it."""
    kept = 0
    for model in models_in(MODELS[kind], set()):
        for name, field in model.model_fields.items():
            if not is_text(types_of(field.annotation, tuple(field.metadata))):
                continue
            adapter = TypeAdapter(Annotated[field.annotation, field])
            for written in SCALARS:
                try:
                    value = adapter.validate_python(written)
                except (ValidationError, PolyfleetError):
                    continue
                assert value == written, f"{model.__name__}.{name}"
                kept += 1
    assert kept > 100

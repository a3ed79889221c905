"""Derive raycluster.schema.json from KubeRay's CRD: python derive.py ray.io_rayclusters.yaml > raycluster.schema.json

The CRD is ray-operator/config/crd/bases/ray.io_rayclusters.yaml of github.com/ray-project/kuberay (Apache-2.0), here of
tag v1.7.0. Kept is all that validates, of version v1; dropped are descriptions and the status. It is made strict: an
object takes the properties it lists and no other, as `kubectl apply` has it. Equal subtrees stand once, under $defs.
"""

import hashlib
import json
import sys
from pathlib import Path

import yaml

KEPT = {
    *("type", "enum", "required", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems"),
    *("minProperties", "maxProperties", "format", "uniqueItems", "not"),
}
SHARED_BYTES = 200


def strict(schema: dict) -> dict:
    kept = {key: value for key, value in schema.items() if key in KEPT}
    if schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"} | kept]}
    for word in ("anyOf", "allOf", "oneOf"):
        if word in schema:
            kept[word] = [strict(part) for part in schema[word]]
    if "items" in schema:
        kept["items"] = strict(schema["items"])
    if "properties" in schema:
        kept["properties"] = {name: strict(part) for name, part in schema["properties"].items()}
        kept["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    elif isinstance(schema.get("additionalProperties"), dict):
        kept["additionalProperties"] = strict(schema["additionalProperties"])
    return kept


def shared(schema, counts: dict[str, int], defs: dict):
    """`schema` with each subtree that occurs more than once replaced by a reference."""
    if isinstance(schema, list):
        return [shared(part, counts, defs) for part in schema]
    if not isinstance(schema, dict):
        return schema
    key = digest(schema)
    inner = {name: shared(part, counts, defs) for name, part in schema.items()}
    if counts.get(key, 0) < 2 or "type" not in schema:
        return inner
    defs[key] = inner
    return {"$ref": f"#/$defs/{key}"}


def digest(schema: dict) -> str:
    return hashlib.sha256(json.dumps(schema, sort_keys=True).encode()).hexdigest()[:8]


def count(schema, counts: dict[str, int]) -> None:
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        count(part, counts)
    if isinstance(schema, dict) and len(json.dumps(schema)) > SHARED_BYTES:
        counts[digest(schema)] = counts.get(digest(schema), 0) + 1


def derive(crd: bytes) -> dict:
    document = yaml.safe_load(crd)
    version = next(v for v in document["spec"]["versions"] if v["name"] == "v1")
    whole = version["schema"]["openAPIV3Schema"]
    whole["properties"].pop("status")
    whole["properties"]["metadata"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True, "properties": {}}
    schema, counts, defs = strict(whole), {}, {}
    count(schema, counts)
    origin = hashlib.sha256(crd).hexdigest()
    made = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": f"Derived by derive.py from KubeRay v1.7.0 (Apache-2.0), CRD sha256 {origin}",
        "required": ["apiVersion", "kind", "metadata", "spec"],
    }
    rest = shared(schema, counts, defs)
    return made | rest | {"$defs": dict(sorted(defs.items()))}


if __name__ == "__main__":
    print(json.dumps(derive(Path(sys.argv[1]).read_bytes()), separators=(",", ":")))

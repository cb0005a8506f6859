"""Writes `k8s/schemas/KIND-GROUP-VERSION.json` from a CRD: `python -m k8s.schemas CRD.yaml [VERSION]`.

Descriptions and the status are dropped, and unknown fields are refused, as kubectl does with strict validation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent
#: Keywords whose schemas add conditions to fields that are described elsewhere, so that they refuse no others.
_CONDITIONS = ("allOf", "anyOf", "oneOf", "not")


def main() -> None:
    """Write the schema of the version that is named, else of the stored one."""
    crd = yaml.safe_load(Path(sys.argv[1]).read_text())["spec"]
    wanted = sys.argv[2] if len(sys.argv) > 2 else None
    version = next(one for one in crd["versions"] if one["name"] == wanted or (wanted is None and one["storage"]))
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"].pop("status", None)
    schema["properties"]["metadata"] = {"type": "object"}
    schema["$schema"] = "http://json-schema.org/draft-07/schema#"
    name = f"{crd['names']['kind'].lower()}-{crd['group']}-{version['name']}.json"
    (FOLDER / name).write_text(json.dumps(schema, separators=(",", ":")) + "\n")
    print(FOLDER / name)


def strict(schema: Any) -> Any:
    """Return a structural schema as a JSON schema that refuses unknown fields."""
    if not isinstance(schema, dict):
        return schema
    result = {
        key: value
        for key, value in schema.items()
        if not key.startswith("x-") and key not in ("description", "nullable")
    }
    for key, value in result.items():
        if key == "properties":
            result[key] = {name: strict(one) for name, one in value.items()}
        elif key in ("items", "additionalProperties"):
            result[key] = strict(value)
        elif key in _CONDITIONS:
            result[key] = value
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if "properties" in result and not is_open:
        result["additionalProperties"] = False
    if schema.get("nullable") and isinstance(result.get("type"), str):
        result["type"] = [result["type"], "null"]
    return result


if __name__ == "__main__":
    main()

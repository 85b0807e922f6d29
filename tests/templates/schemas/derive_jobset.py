"""Write jobset.json from the models of the PyPI distribution kubeflow-trainer-api (Apache-2.0).

    pip install kubeflow-trainer-api==2.3.0
    python tests/templates/schemas/derive_jobset.py

The models are those that the JobSet project generates from its Go types. What is left out: descriptions, the status,
and what is Kubernetes' own (metadata; the template of a Job, which the tests check as a Job).
"""

import json
from pathlib import Path
from typing import Any

from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

OURS = "JobsetV1alpha2"
ANY_OBJECT = {"type": "object"}


def plain(schema: Any) -> Any:
    """A schema without descriptions, titles, defaults and null."""
    if not isinstance(schema, dict):
        return schema
    if "anyOf" in schema:
        (one,) = [each for each in schema["anyOf"] if each.get("type") != "null"]
        return plain(one)
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return {"$ref": f"#/$defs/{name}"} if name.startswith(OURS) else ANY_OBJECT
    kept = {key: value for key, value in schema.items() if key in ("type", "enum", "required")}
    if "items" in schema:
        kept["items"] = plain(schema["items"])
    if "properties" in schema:
        kept["properties"] = {name: plain(each) for name, each in schema["properties"].items()}
        kept["additionalProperties"] = False
    return kept


def main() -> None:
    """Write the schema beside this file."""
    whole = JobsetV1alpha2JobSet.model_json_schema(by_alias=True)
    definitions = {name: plain(each) for name, each in whole["$defs"].items() if name.startswith(OURS)}
    root = plain({key: value for key, value in whole.items() if key != "$defs"})
    del root["properties"]["status"]
    root["properties"]["apiVersion"] = {"const": "jobset.x-k8s.io/v1alpha2"}
    root["properties"]["kind"] = {"const": "JobSet"}
    root["required"] = ["apiVersion", "kind", "metadata", "spec"]
    used = {name: each for name, each in definitions.items() if not name.endswith("Status")}
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, "$defs": used}
    text = json.dumps(schema, indent=2) + "\n"
    Path(__file__).with_name("jobset.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

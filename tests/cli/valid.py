"""What the commands print, held against the schemas in docs/schemas."""

from __future__ import annotations

import json
from typing import Any

from jsonschema import Draft202012Validator

from tests.cli.running import ROOT


def schema_of(command: str) -> dict[str, Any]:
    """The documented one, strict: no field that it does not name."""
    schema: dict[str, Any] = json.loads((ROOT / "docs" / "schemas" / f"{command}.json").read_text())
    for definition in schema["$defs"].values():
        if "properties" in definition:
            definition["additionalProperties"] = False
    return schema


def check(command: str, document: object) -> None:
    Draft202012Validator(schema_of(command)).validate(document)

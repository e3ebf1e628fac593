"""Runs the command as a user does, in a process of its own, and holds its JSON against the schemas in docs/schemas."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

ROOT = Path(__file__).parents[2]


def megaprof(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "megaprof", *map(str, arguments)],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "100", **environment},
        timeout=120,
        text=True,
    )


def schema_of(command: str) -> dict[str, Any]:
    """The documented one, strict: no field that it does not name."""
    schema: dict[str, Any] = json.loads((ROOT / "docs" / "schemas" / f"{command}.json").read_text())
    for definition in schema["$defs"].values():
        if "properties" in definition:
            definition["additionalProperties"] = False
    return schema


def check(command: str, document: object) -> None:
    """Raises ValidationError."""
    Draft202012Validator(schema_of(command)).validate(document)

"""Runs the command, and holds its JSON against the schemas in docs/schemas."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

from jsonschema import Draft202012Validator

from megaprof.cli import main

ROOT = Path(__file__).parents[2]


def megaprof(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in this process, in a terminal of 100 columns."""
    typed = list(map(str, arguments))
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n", write_through=True) for _ in range(2))
    with mock.patch.dict(os.environ, {"COLUMNS": "100", **environment}), redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(typed)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    told = (stream.buffer.getvalue().decode() for stream in (out, err))
    return subprocess.CompletedProcess(typed, code, *told)


def as_a_user(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with what an interpreter reads from ``environment`` when it begins."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "megaprof", *map(str, arguments)],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "100", **environment},
        timeout=600,
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

"""JSON Schemas of what the commands print, from their classes: ``python -m tests.schemas docs`` writes them."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from megaprof.analysis.hang import Hang
from megaprof.analysis.merge import MergeAnswer
from megaprof.analysis.notes import Note
from megaprof.analysis.report import report
from megaprof.analysis.report.diff import Diff
from megaprof.cli.status import StatusAnswer
from megaprof.cli.what_if import WhatIfAnswer
from megaprof.control.request import Outcome
from megaprof.export.parquet import ExportAnswer
from megaprof.foreign import Foreign
from megaprof.rehearse.rehearsal import Rehearsal
from megaprof.tune.tuning import Tuning


@dataclass(frozen=True, kw_only=True)
class Document(report.Document):
    foreign: Foreign | None = None


Document.__doc__ = report.Document.__doc__
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schemas() -> dict[str, dict[str, Any]]:
    """The schema of every command's JSON, by command."""
    return {
        name: {"$schema": _DIALECT, "title": f"megaprof {name} --json", **_complete(shape)}
        for name, shape in {
            "diff": Diff,
            "export": ExportAnswer,
            "hang": Hang,
            "merge": MergeAnswer,
            "rehearse": Rehearsal,
            "report": Document,
            "status": StatusAnswer,
            "trigger": Outcome,
            "tune": Tuning,
            "what-if": WhatIfAnswer,
        }.items()
    }


def write(docs: Path) -> None:
    """Writes ``schemas/COMMAND.json`` for each command, and tables of the report's as ``json.md``. Raises OSError."""
    (docs / "schemas").mkdir(parents=True, exist_ok=True)
    found = schemas()
    for name, schema in found.items():
        (docs / "schemas" / f"{name}.json").write_text(json.dumps(schema, indent=1) + "\n", encoding="utf-8")
    (docs / "json.md").write_text("\n".join(_page(found["report"])), encoding="utf-8")


def _page(schema: dict[str, Any]) -> Iterator[str]:
    yield "# The JSON of a report"
    yield ""
    yield "Every field that `megaprof report DIR --json FILE` writes ([schema](schemas/report.json)); the top level is"
    yield "`Document`. A field is always there, and null if its value is not known. Only a `Note` leaves out the facts"
    yield "that its kind does not have. `make schemas` generates this page from the classes of the report."
    for name, each in schema["$defs"].items():
        yield ""
        yield f"## {name}"
        yield ""
        yield each.get("description", "")
        yield ""
        yield "| field | type | meaning |"
        yield "|---|---|---|"
        for field, value in each["properties"].items():
            yield f"| `{field}` | {_type(value)} | {value.get('description', '')} |"
    yield ""


def _type(value: dict[str, Any]) -> str:
    """``list of Cause``, ``number or null``, ``one of `a`, `b` ``: a type in a few words."""
    if "anyOf" in value:
        return " or ".join(_type(each) for each in value["anyOf"])
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in value:
        return "one of " + ", ".join(f"`{each}`" for each in value["enum"])
    if "prefixItems" in value:
        return f"list: {', '.join(_type(each) for each in value['prefixItems'])}"
    if value.get("type") == "array":
        return f"list of {_type(value['items'])}"
    if isinstance(inner := value.get("additionalProperties"), dict):
        return f"object of {_type(inner)}"
    return str(value.get("type", "any"))


@cache
def _about(of: Any) -> dict[str, str]:
    """Returns what the line below each field of a class says, in JSON's words; what a class inherits, too."""
    inherited = {name: about for base in reversed(of.__mro__[1:]) for name, about in _about(base).items()}
    return inherited | _said(of)


def _said(of: Any) -> dict[str, str]:
    try:
        source = inspect.getsource(of)
    except (OSError, TypeError):  # made here, of fields that say what they are
        return {}
    (tree,) = ast.parse(textwrap.dedent(source)).body
    lines = tree.body if isinstance(tree, ast.ClassDef) else []
    return {
        field.target.id: _in_json(" ".join(below.value.value.split()))
        for field, below in pairwise(lines)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }


def _in_json(text: str) -> str:
    return re.sub(r"\bNone\b", "null", text).replace("``", "`")


def _complete(shape: Any) -> dict[str, Any]:
    """The schema, with what each field is. Every field is always written, whatever default the class
    has, but for the facts of a note."""
    schema = msgspec.json.schema(shape)
    about = {each.__name__: _about(each) for each in _dataclasses(shape)}
    for name, definition in schema["$defs"].items():
        if "description" in definition:
            definition["description"] = _in_json(inspect.cleandoc(definition["description"]))
        fields = definition.get("properties", {})
        for field, value in fields.items():
            value.pop("default", None)
            if (said := about.get(name, {}).get(field)) is not None:
                value["description"] = said
        if name != Note.__name__:
            definition["required"] = list(fields)
    return schema


def _dataclasses(shape: Any, above: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Yields the dataclasses that a type consists of. ``above``: those that it is a part of."""
    if shape in above:
        return
    if is_dataclass(shape) or (isinstance(shape, type) and issubclass(shape, msgspec.Struct)):
        yield shape
    inner = get_type_hints(shape).values() if hasattr(shape, "__annotations__") else get_args(shape)
    for each in inner:
        yield from _dataclasses(each, (*above, shape))


if __name__ == "__main__":
    if not Path(sys.argv[1]).is_dir():
        sys.exit(f"{sys.argv[1]} is no directory")
    write(Path(sys.argv[1]))

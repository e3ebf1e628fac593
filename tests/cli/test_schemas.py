"""The schemas in docs/schemas are those of the dataclasses, exit codes those of the documents."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError

from megaprof.cli import FAILED, INTERRUPTED, TERMINATED, UNWELL, USAGE, main
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests import schemas
from tests.analysis.exchanging import exchanging, write
from tests.analysis.job_timelines import Slow, write_timelines
from tests.analysis.synthetic import pipeline
from tests.cli.running import ROOT, check, schema_of

COMMANDS = ("diff", "export", "hang", "merge", "rehearse", "report", "status", "trigger", "tune", "what-if")


def test_the_schemas_are_up_to_date(tmp_path: Path) -> None:
    schemas.write(tmp_path)
    documented = {path.name: path.read_text() for path in (ROOT / "docs" / "schemas").iterdir()}
    assert {path.name: path.read_text() for path in (tmp_path / "schemas").iterdir()} == documented, "make schemas"
    assert documented.keys() == {f"{command}.json" for command in COMMANDS}
    assert (tmp_path / "json.md").read_text() == (ROOT / "docs" / "json.md").read_text(), "make schemas"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_field_says_what_it_is(command: str) -> None:
    schema = schema_of(command)
    Draft202012Validator.check_schema(schema)
    silent = {
        f"{name}.{field}"
        for name, each in schema["$defs"].items()
        for field, value in each.get("properties", {}).items()
        if "description" not in value
    }
    # Their names are those of Megatron's options.
    assert silent <= {f"ParallelSizes.{axis}" for axis in ("tp", "pp", "cp", "ep", "dp", "vpp", "etp")}


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert main([*map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def test_reports_and_their_differences_are_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline(tmp_path / "before", [6, 2])
    pipeline(tmp_path / "after", [4, 4])
    write(exchanging([0.0, 0.0]), tmp_path / "few")
    layout = WorldLayout(ParallelSizes(pp=2, dp=2))
    write_timelines(tmp_path / "run", layout, steps=60, slow=[Slow(rank=1, from_step=20, factor=2.0)])
    for each in ("before", "after", "few", "run"):
        check("report", printed(capsys, "report", tmp_path / each, "--json", "-"))
    difference = printed(capsys, "diff", tmp_path / "before", tmp_path / "after", "--json")
    assert difference["targets"][0]["prediction"] is not None
    check("diff", difference)


def test_what_was_merged_and_exported_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(exchanging([0.0, 40.0]), tmp_path / "traces")
    write(exchanging([0.0, 0.0], target="evaluate", step=2), tmp_path / "traces")
    out = tmp_path / "step.json"
    merged = printed(capsys, "merge", tmp_path / "traces", "-o", out, "--json")
    check("merge", merged)
    assert (merged["target"], merged["role"], merged["step"]) == ("train_actor", None, 5)
    assert (merged["ranks"], merged["arrows"]) == ([0, 1], 6)
    assert (merged["file"], merged["bytes"]) == (str(out), out.stat().st_size)
    assert merged["others"] == ["evaluate step 2"]
    write_timelines(tmp_path / "run", WorldLayout(ParallelSizes(pp=2, dp=2)), steps=3)
    exported = printed(capsys, "export", tmp_path / "run", "--parquet", tmp_path / "out", "--run", "mine", "--json")
    check("export", exported)
    assert (exported["rows"], exported["files"]) == (12, 4)


def test_a_field_that_is_missing_or_unknown_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline(tmp_path, [6, 2])
    report = printed(capsys, "report", tmp_path, "--json", "-")
    (target,) = report["targets"]
    for changed in (
        {**target, "new": 1},
        {k: v for k, v in target.items() if k != "what_if"},
        {**target, "steps": "x"},
    ):
        with pytest.raises(ValidationError):
            check("report", {**report, "targets": [changed]})


def test_the_documents_have_the_exit_codes() -> None:
    rows = re.findall(r"^\| (\d+) \| .* \|$", (ROOT / "docs" / "scripts.md").read_text(), re.M)
    assert [*map(int, rows)] == [0, FAILED, USAGE, UNWELL, INTERRUPTED, TERMINATED]


@pytest.mark.parametrize(("arguments", "code"), [(["report", "nowhere"], 1), (["report", ".", "--workers", "x"], 2)])
def test_what_the_codes_say_is_what_commands_end_with(arguments: list[str], code: int) -> None:
    assert main(arguments) == code

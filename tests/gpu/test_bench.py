"""The command for a GPU, rehearsed without one: that it runs, isolates its parts, and says what it found."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from megaprof.testing.launcher import RankReport, RanksFailed
from tests import programs
from tests.gpu import bench, page
from tests.gpu.__main__ import main
from tests.gpu.found import difference
from tests.gpu.parts import PARTS, Part
from tests.gpu.parts.__main__ import said

PAGE = f"# Figures\n\n{page.BEGIN}\n\nNot run yet.\n\n{page.END}\n\nThe end.\n"


#: The ranks of a part begin at once as well.
PART = """
import runpy
from megaprof.testing import launcher
from tests.warm_ranks import Server
with Server(launcher.start) as server:
    launcher.start = server.start
    runpy.run_module({module!r}, run_name='__main__', alter_sys=True)
"""


def begun_at_once(command: list[str], *, timeout: float, **_: object) -> Any:
    return programs.run(PART.format(module=command[2]), *command[3:], limit=timeout)


@pytest.mark.slow
# The next test runs nsys, and cost_large is cost, where no GPU's memory decides how large.
@pytest.mark.parametrize("name", sorted({*PARTS} - {"nsys", "cost_large"}))
def test_every_part_is_as_expected_in_a_rehearsal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.subprocess, "run", begun_at_once)
    if name in ("compiled", "transformer_engine"):  # which decide what is imported, so that no fork would do
        monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    part = bench.Bench([name], cpu=True, seconds=600).run()["parts"][name]
    assert "failed" not in part, part
    assert part["checks"] or part["skipped"]
    assert [check for check in part["checks"] if check["held"] is False] == []


@pytest.mark.slow
def test_one_part_that_fails_leaves_the_others_and_the_last_line_is_all_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PARTS, "gone", Part("a part that no module has", alone=True))
    written, out = tmp_path / "gpu.md", tmp_path / "out.json"
    written.write_text(PAGE)
    assert main(["--cpu", "--parts", "gone", "nsys", "--docs", str(written), "--out", str(out)]) == 1
    said, err = capfd.readouterr()
    (line,) = said.splitlines()
    found = json.loads(line)
    assert json.loads(out.read_text())["parts"] == found["parts"]
    assert found["as_expected"] is False
    assert "No module named 'tests.gpu.parts.gone'" in found["parts"]["gone"]["failed"]
    assert [(each["expected"], each["found"]) for each in found["parts"]["nsys"]["checks"]] == [(2, 2), (2, 2)]
    assert "yes cudaProfilerStart is called: expected 2, found 2" in err
    text = written.read_text()
    assert "Not run yet" not in text
    assert text.startswith(f"# Figures\n\n{page.BEGIN}\n\nno GPU: a rehearsal on the CPU")
    assert text.endswith(f"{page.END}\n\nThe end.\n")
    assert page.table(found) in text


def test_a_part_that_hangs_is_ended(tmp_path: Path) -> None:
    assert bench._process("cost", str(tmp_path), True, 0.01, {})["failed"] == "it took longer than 0 s"


def test_a_total_limit_is_kept_and_what_was_not_reached_is_named() -> None:
    found = bench.Bench(["nsys", "cost"], cpu=True, seconds=1.0).run()
    assert found["not_reached"] == ["nsys", "cost"]
    assert not found["as_expected"]


def test_a_part_that_fails_when_time_is_up_was_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_short(*_: object) -> dict[str, str]:
        ran.ends = time.monotonic()
        return {"failed": "rank 0 hung, killed at the time limit"}

    monkeypatch.setattr(bench, "_process", cut_short)
    ran = bench.Bench(["pipeline"], cpu=True, seconds=600)
    found = ran.run()
    assert found["not_reached"] == ["pipeline"]
    assert found["parts"]["pipeline"]["failed"].endswith("rank 0 hung, killed at the time limit")


def test_the_exception_is_said_and_not_the_last_line_of_stderr(tmp_path: Path) -> None:
    reports = (
        RankReport(0, "raised", traceback="Traceback\nValueError: 3\n", stderr="a warning"),
        RankReport(1, "hung", stack="..."),
    )
    ranks = "rank 0: ValueError: 3; rank 1 hung, killed at the time limit"
    assert said(RanksFailed(reports, 1.0)) == ranks
    assert said(KeyError("a")) == "KeyError: 'a'"


def test_the_difference_of_neighbours_ignores_a_drift_and_a_step_that_stalls() -> None:
    these = [100.0 + number for number in range(9)]
    those = [each + 5.0 for each in these[:-1]] + [900.0]
    assert difference(those, these) == [5.0, 0.0]


def test_every_part_is_a_module_and_has_a_row_in_the_documentation() -> None:
    here = Path(__file__).parent
    rows = (here.parents[1] / "docs/gpu.md").read_text().partition("| part |")[2].partition("\n\n")[0].splitlines()[2:]
    named = {name for row in rows for name in row.split("|")[1].strip().split(", ")}
    modules = {path.stem for path in (here / "parts").glob("[!_]*.py")}
    assert set(PARTS) == named == modules


def test_only_what_was_not_as_expected_is_wrong() -> None:
    def part(*held: bool | None) -> dict[str, object]:
        checks = [{"what": f"no. {n}", "expected": "1", "found": 2, "held": each} for n, each in enumerate(held)]
        return {"figures": {}, "checks": checks, "skipped": None}

    assert bench.held(part(True, None))
    assert not bench.held(part(True, False))
    assert bench.verdict(part(True, False)) == "not as expected: no. 1"
    assert list(bench.lines(part(None))) == ["  - no. 0: expected 1, found 2", "as expected"]
    assert bench.held({"figures": {}, "checks": [], "skipped": "no such library"})
    assert not bench.held({"failed": "it broke"})


def test_a_page_without_marks_and_a_machine_without_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = tmp_path / "page.md"
    nothing.write_text("nothing")
    with pytest.raises(ValueError, match="must stand in it"):
        page.write(nothing, {})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([]) == 2
    assert "there is no GPU that torch can use" in capsys.readouterr().err


def test_what_is_missing_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.gpu.__main__.NEEDED", ("torch", "nowhere.to.be.found"))
    assert main(["--cpu"]) == 2
    assert "missing: nowhere.to.be.found;" in capsys.readouterr().err

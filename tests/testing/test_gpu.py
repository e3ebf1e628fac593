"""The command for a GPU, rehearsed without one: that it runs, isolates its parts, and says what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaprof.testing import gpu

PAGE = f"# Figures\n\n{gpu.BEGIN}\n\nNot run yet.\n\n{gpu.END}\n\nThe end.\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", gpu.PARTS)
def test_every_part_is_as_expected_in_a_rehearsal(name: str) -> None:
    part = gpu.run([name], cpu=True)["parts"][name]
    assert "failed" not in part, part
    assert part["checks"]
    assert [check for check, held in part["checks"].items() if not held] == []


def test_figures_go_to_a_file_and_a_page_and_one_part_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(gpu.PARTS, "gone", "a part that no module has")
    page, file = tmp_path / "gpu.md", tmp_path / "gpu.json"
    page.write_text(PAGE)
    assert gpu.main(["--cpu", "--parts", "gone", "nsys", "--json", str(file), "--docs", str(page)]) == 1
    found = json.loads(file.read_text())
    assert "KeyError: 'gone'" in found["parts"]["gone"]["failed"]
    assert found["parts"]["nsys"]["figures"]["windows"] == 2
    written = page.read_text()
    assert "Not run yet" not in written
    assert "| nsys: " in written
    assert "| failed: " in written
    assert written.startswith(f"# Figures\n\n{gpu.BEGIN}\n\nno GPU: a rehearsal on the CPU")
    assert written.endswith(f"{gpu.END}\n\nThe end.\n")
    assert gpu.table(found) in capsys.readouterr().out


def test_a_part_that_hangs_is_ended_and_a_total_limit_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "MOST", 0.01)
    assert gpu._part("capture", True, 0.01) == {"failed": "it took longer than 0 s"}
    assert gpu.run(["nsys"], cpu=True, seconds=1.0)["parts"]["nsys"] == {"failed": "no time was left of 1 s"}


def test_a_page_without_marks_and_a_machine_without_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="must stand in it"):
        gpu.write_docs(page, {})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "there is no GPU that torch can use" in capsys.readouterr().err

"""Files that appear whole or not at all, also where somebody else has been before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megaprof.formats.files import appearing
from megaprof.formats.names import temporary_path


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    final, precious = tmp_path / "report.json", tmp_path / "precious"
    precious.write_text("ten years")
    temporary_path(final).symlink_to(precious)
    final.symlink_to(precious)
    with appearing(final) as file:
        file.write(b"new")
    assert precious.read_text() == "ten years"
    assert not final.is_symlink()
    assert final.read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path)) == ["precious", "report.json"]


def test_after_an_exception_there_is_what_was_there(tmp_path: Path) -> None:
    final = tmp_path / "report.json"
    final.write_text("old")

    def fails() -> None:
        with appearing(final) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert final.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.json"]

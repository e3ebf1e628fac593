"""One part in a process of its own: ``python -m tests.gpu.parts NAME WORK [--cpu]``."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from megaprof.testing.launcher import RanksFailed


def _found(name: str, work: Path, cpu: bool) -> dict[str, Any]:
    try:
        return dataclasses.asdict(importlib.import_module(f"tests.gpu.parts.{name}").run(work, cpu))
    except Exception as error:
        return {"failed": said(error), "traceback": traceback.format_exc().splitlines()[-200:]}


def said(error: Exception) -> str:
    """The exception in a line; of ranks, that of each."""
    if not isinstance(error, RanksFailed):
        return traceback.format_exception_only(error)[-1].strip()
    return "; ".join(
        f"rank {each.rank}: {each.traceback.strip().splitlines()[-1]}" if each.traceback else str(each).splitlines()[0]
        for each in error.reports
    )


if __name__ == "__main__":
    name, directory, *rest = sys.argv[1:]
    found = _found(name, Path(directory), rest == ["--cpu"])
    (Path(directory) / "result.json").write_text(json.dumps(found))

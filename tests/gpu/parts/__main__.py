"""One part in a process of its own: ``python -m tests.gpu.parts NAME WORK [--cpu]``."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    name, directory, *rest = sys.argv[1:]
    found = importlib.import_module(f"tests.gpu.parts.{name}").run(Path(directory), rest == ["--cpu"])
    (Path(directory) / "result.json").write_text(json.dumps(dataclasses.asdict(found)))

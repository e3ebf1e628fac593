"""One part in a process of its own: ``python -m tests.gpu.parts NAME WORK [--cpu]``."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import fcntl
import importlib
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaprof.testing.launcher import RanksFailed
from tests.gpu.bench import ENDS, LEAST, LOCK, not_reached
from tests.gpu.parts import PARTS
from tests.gpu.ranks import DEADLINE


def _found(name: str, work: Path, cpu: bool) -> dict[str, Any]:
    try:
        run = importlib.import_module(f"tests.gpu.parts.{name}").run
        with _turn():
            began = time.monotonic()
            left = float(os.environ.get(ENDS, math.inf)) - began
            if left < LEAST:
                return not_reached(left)
            if not cpu:  # where other things may run, too
                most = min(left, PARTS[name].seconds)
                os.environ[DEADLINE] = str(began + most)
                faulthandler.dump_traceback_later(most, exit=True)
            return {**dataclasses.asdict(run(work, cpu)), "seconds": time.monotonic() - began}
    except Exception as error:
        return {"failed": said(error), "traceback": traceback.format_exc().splitlines()[-200:]}


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """While no other part runs, if this one should run alone."""
    with open(os.environ.get(LOCK) or os.devnull, "w") as file:
        if os.environ.get(LOCK):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


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
    (Path(directory) / "result.json").write_text(json.dumps(found, default=lambda value: value.item()))  # numpy's

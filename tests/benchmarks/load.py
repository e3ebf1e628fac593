"""What every rank asks of its host and of the file system: measured on a real job, computed for any number of ranks.

    python -m tests.benchmarks.load    start-up cost and file operations of a real two-rank job; last line JSON
    python -m tests.benchmarks.scale --table      the table

The table multiplies what one rank does, as constants of the code say (intervals, sizes, files kept, ranks a directory),
by the ranks. How many operations that is, ``START``, ``LOOK`` and ``END``, is what the first command counts; a test
compares them. An operation is a call that a network file system may have to ask its metadata server about: opening,
listing, looking up, making, renaming or removing. Reading and writing are counted apart.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megaprof import ProfileConfig
from megaprof.config.options import options
from megaprof.formats.job import interval
from megaprof.formats.names import SHARD_RANKS, shard
from megaprof.parallel.topology import ParallelSizes, RankCoords, WorldLayout
from megaprof.recorders.timeline_steps import FILES
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks
from tests.analysis.job_timelines import write_timelines

ROOT = Path(__file__).parents[2]

RANKS = (64, 512, 4_096, 16_384, 100_000)
#: What the table assumes of the job.
STEP_SECONDS, MICROBATCHES, STAGES, TRACE_MB = 10.0, 32, 16, 10.0

#: Operations of one rank that is not the lowest: at most those of its start; of each look at the control directory; at
#: the end.
START, LOOK, END = 18, 7, 5
#: Of a status file, of a rank in the middle of a step.
STATUS_BYTES = 1024
_AUDITED = {"open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod"}


class Counted:
    """Every operation below ``directory`` from now on. There is one, since an audit hook cannot be removed."""

    def __init__(self, directory: Path) -> None:
        self.operations: list[tuple[str, str]] = []
        place, stat = str(directory), os.stat

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            # A number, or a name alone, is one of a directory that is held open.
            if event not in _AUDITED or not arguments or (event == "open" and isinstance(arguments[0], int)):
                return
            if _below(place, arguments[0]) or "/" not in str(arguments[0]):
                self.operations.append((event, str(arguments[0])))

        def counted(path: Any, *arguments: Any, **named: Any) -> os.stat_result:
            if _below(place, path) or named.get("dir_fd") is not None:
                self.operations.append(("os.stat", str(path)))
            return stat(path, *arguments, **named)

        sys.addaudithook(hook)
        os.stat = counted  # type: ignore[assignment]

    def take(self) -> list[tuple[str, str]]:
        taken, self.operations = self.operations, []
        return taken


def _below(place: str, path: Any) -> bool:
    return str(path).startswith(place)


def one_rank(directory: str, looks: int) -> dict[str, Any]:
    """In a rank: install the hooks, train until its listener has looked ``looks`` times, remove them."""
    from megaprof import install_hooks
    from megaprof.control.listener import Listener

    init_distributed()
    with cpu_megatron():
        gpt = build(GPTWorkload(pp=2, layers=2, microbatches=2, hidden=64, seq_length=32))
        gpt.train_step()
        counted = Counted(Path(directory))
        done, look = threading.Event(), Listener.look
        seen: list[int] = []

        def watched(self: Listener) -> None:
            look(self)
            seen.append(len(counted.operations))
            if len(seen) >= looks:
                done.set()

        Listener.look = watched  # type: ignore[method-assign]
        config = ProfileConfig(target=("train_actor",), tool=("timeline",), dir=directory)
        begin = time.perf_counter()
        handle = install_hooks(gpt.chunks, config)
        installed = time.perf_counter() - begin
        gpt.train_step()
        for _ in range(looks):  # as many on both ranks; a step is a write and no operation
            time.sleep(1.0)
            gpt.train_step()
        done.wait(60)
        looked, operations = list(seen), counted.take()
        steady = [later - earlier for earlier, later in itertools.pairwise(looked[2:])]
        begin = time.perf_counter()
        handle.remove()
        removed = time.perf_counter() - begin
    return {
        "install_ms": 1e3 * installed,
        "remove_ms": 1e3 * removed,
        # What the first three looks did more than any other, and what came before them.
        "start": looked[2] - 3 * statistics.mode(steady),
        "look": statistics.mode(steady),
        "end": len(counted.operations),
        "first": operations[: looked[2]],
    }


def import_seconds() -> float:
    """Processor time of what ``install_hooks`` imports beyond torch and megatron-core; least of three."""
    code = (
        "import time, torch, numpy, megatron.core.parallel_state, megatron.core.pipeline_parallel.schedules\n"
        "begin = time.process_time()\n"
        "from megaprof.autoload import install\n"
        "print(time.process_time() - begin)"
    )
    runs = [
        subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT)
        for _ in range(3)
    ]
    return min(float(run.stdout) for run in runs)


def modules() -> int:
    """Files of ours that a rank imports from the (often shared) file system that Python lies on."""
    count = "print(sum(name.split('.')[0] == 'megaprof' for name in sys.modules))"
    code = f"import sys; from megaprof.autoload import install; {count}"
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT)
    return int(run.stdout)


def coordinates_seconds(ranks: int) -> float:
    """Of a rank's own place, selection and name in a world of ``ranks``."""
    from megaprof.parallel.selectors import PER_STAGE

    begin = time.perf_counter()
    layout = WorldLayout(ParallelSizes(tp=8, pp=16, cp=2, dp=ranks // 256, ep=8, etp=1))
    coords = layout.coords(ranks - 1)
    PER_STAGE.check(layout.sizes, layout)
    PER_STAGE.selects(coords)
    shard(coords.rank, coords.sizes.world)
    return time.perf_counter() - begin


def bytes_per_step() -> float:
    """Of a rank in the middle of the pipeline, as the format encodes it."""
    layout = WorldLayout(ParallelSizes(pp=STAGES))
    with tempfile.TemporaryDirectory() as folder:
        sizes = [
            write_timelines(Path(folder, str(steps)), layout, steps=steps, microbatches=MICROBATCHES, ranks=[8])[0]
            .stat()
            .st_size
            for steps in (20, 120)
        ]
    return (sizes[1] - sizes[0]) / 100


def _timeline_limit() -> int:
    return next(int(o.default) for o in options() if o.name == "timeline_megabytes")


def _shards(ranks: int) -> int:
    coords = RankCoords(0, pp=0, tp=0, cp=0, ep=0, dp=0, sizes=ParallelSizes(dp=ranks))
    return math.ceil(ranks / SHARD_RANKS) if shard(coords.rank, coords.sizes.world) else 1


def rows() -> list[tuple[str, Callable[[int], float], str]]:
    """What, of how many ranks, and how it is shown."""
    step_bytes = bytes_per_step()
    limit = _timeline_limit() << 20
    return [
        ("**start:** directories for files, and for status", lambda n: 2 * _shards(n), "{:,.0f}"),
        ("files created (timeline and status of every rank)", lambda n: 2 * n, "{:,.0f}"),
        ("metadata operations", lambda n: START * n, "{:,.0f}"),
        ("**all the time:** seconds between two looks of a rank", interval, "{:,.1f}"),
        ("status writes a second", lambda n: n / interval(n), "{:,.0f}"),
        ("status, MB/s", lambda n: n / interval(n) * STATUS_BYTES / 1e6, "{:,.2f}"),
        ("metadata operations a second, status and polling", lambda n: LOOK * n / interval(n), "{:,.0f}"),
        ("timeline writes a second", lambda n: n / STEP_SECONDS, "{:,.0f}"),
        ("timeline, MB/s", lambda n: n / STEP_SECONDS * step_bytes / 1e6, "{:,.2f}"),
        ("timeline, GB a day", lambda n: n / STEP_SECONDS * step_bytes * 86400 / 1e9, "{:,.1f}"),
        ("days of steps in a timeline at its limit", lambda n: limit / step_bytes * STEP_SECONDS / 86400, "{:,.1f}"),
        ("timelines at their limit, GB", lambda n: n * limit / 1e9, "{:,.0f}"),
        ("**capture:** files, one rank per stage", lambda n: min(n, STAGES), "{:,.0f}"),
        ("files, all ranks", lambda n: n, "{:,.0f}"),
        ("GB, all ranks", lambda n: n * TRACE_MB / 1e3, "{:,.1f}"),
        ("**end:** metadata operations", lambda n: END * n, "{:,.0f}"),
        ("**on disk:** timelines and status files", lambda n: (FILES + 1) * n, "{:,.0f}"),
        ("most of them in one directory", lambda n: FILES * min(n, SHARD_RANKS), "{:,.0f}"),
    ]


def table() -> str:
    """Markdown, one column for each number of `RANKS`."""
    lines = [
        "| | " + " | ".join(f"{ranks:,} ranks" for ranks in RANKS) + " |",
        "|---|" + "---|" * len(RANKS),
    ]
    lines += [
        f"| {what} | " + " | ".join(shown.format(of(ranks)) for ranks in RANKS) + " |" for what, of, shown in rows()
    ]
    return "\n".join(lines)


def measure(looks: int = 6) -> list[dict[str, Any]]:
    """`one_rank` on both ranks of a real job. The second is not the lowest."""
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    quiet = {"KINETO_LOG_LEVEL": "6", "PYTHONWARNINGS": "ignore", "PYTHONPATH": path}
    function = importlib.import_module("tests.benchmarks.load").one_rank  # importable by name in the ranks
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(function, 2, str(Path(folder, "job")), looks, timeout=240, env=quiet)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.parse_args()
    lowest, other = measure()
    place = {str(ranks): round(1e6 * coordinates_seconds(ranks)) for ranks in (1_024, 16_384, 102_400)}
    found = {
        "modules": modules(),
        "import_cpu_ms": round(1e3 * import_seconds(), 1),
        "install_ms": round(other["install_ms"], 1),
        "remove_ms": round(other["remove_ms"], 1),
        "own_place_and_selection_us": place,
        "operations": {name: other[name] for name in ("start", "look", "end")},
        "lowest_rank": {name: lowest[name] for name in ("start", "look", "end")},
    }
    print("a rank's first operations:")
    for kind, path in other["first"]:
        print(f"  {kind:10} {path.partition('/job')[2] or '/'}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()

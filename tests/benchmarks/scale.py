"""A large job's timelines: written by a generator, selected, named, reported on, exported; how long, how much memory.

    python -m tests.benchmarks.scale [--ranks 16384] [--steps 100]
    python -m tests.benchmarks.scale --table    the load on a file system, computed

The job is TP 8, PP 16, CP 2, EP 8 (ETP 1) with 32 microbatches and what is left of the ranks as DP. Two ranks in it
become slow on the way. The report must name their groups of coupled ranks (they wait for each other in a microbatch,
so a timeline cannot tell them apart) and the step where each began, nobody else, and nobody at all in a healthy job.

Reports run as the command, in a process of its own; its memory is the sum of what each of its processes had at most.
Growth is over 1/16, 1/4 and all of the ranks. Behind 16,384 ranks come pipelines with few ranks and much to replay,
where what a process takes to import the report is left out. The last line is JSON.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from megaprof.parallel.selectors import parse_selector
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from megaprof.recorders import Window
from tests.analysis.job_timelines import Slow, coupled, write_timelines

ROOT = Path(__file__).parents[2]
SIZES = {"tp": 8, "pp": 16, "cp": 2, "ep": 8, "etp": 1}
MICROBATCHES = 32
#: Stages, replicas and microbatches of jobs with few ranks.
PIPELINES = ((8, 4, 64), (64, 1, 256))
SELECTIONS = ("per-stage", "all", "pp=*,dp=0", "pp=0|8-11,ep=3")


def layout(ranks: int) -> WorldLayout:
    return WorldLayout(ParallelSizes(dp=ranks // (8 * 16 * 2), **SIZES))


def stragglers(world: WorldLayout, steps: int) -> list[Slow]:
    """One in the middle from 40 % on, one in the last stage from 70 % on."""
    ranks = world.sizes.world
    return [
        Slow(rank=ranks // 2 + 3, from_step=steps * 4 // 10, factor=1.2),
        Slow(rank=ranks - 5, from_step=steps * 7 // 10, factor=1.5),
    ]


def generate(directory: Path, ranks: int, steps: int, *, healthy: bool = False) -> float:
    world, begin = layout(ranks), time.perf_counter()
    write_timelines(
        directory,
        world,
        steps=steps,
        microbatches=MICROBATCHES,
        slow=[] if healthy else stragglers(world, steps),
        tails=0.01,
        skew_ms=2.0,
        seed=ranks + healthy,
    )
    return time.perf_counter() - begin


def run(*arguments: object) -> tuple[float, float, float]:
    """Run the command: seconds, processor seconds, and megabytes of all its processes together."""
    return _run("-m", "megaprof", *arguments)


def imported() -> tuple[float, float, float]:
    """The same of importing what a report needs."""
    return _run("-c", "import megaprof.analysis.report.report, megaprof.analysis.report.terminal")


def _run(*arguments: object) -> tuple[float, float, float]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    begin, used, most = time.perf_counter(), _processor_seconds(), {}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)], stdout=output, stderr=output, env=environment
        )
        while process.poll() is None:
            for pid in _family(process.pid):
                most[pid] = max(most.get(pid, 0), _peak(pid))
            time.sleep(0.02)
        seconds = time.perf_counter() - begin
        output.seek(0)
        said = output.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(map(str, arguments))} failed: {said[-2000:]}")
    return seconds, _processor_seconds() - used, sum(most.values()) / 1024


def _processor_seconds() -> float:
    """Of processes that have ended and were waited for, and theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _family(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return [pid]
    return [pid, *(each for child in children for each in _family(child))]


def _peak(pid: int) -> int:
    """Kilobytes that a process had resident at most so far."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0)


def report(directory: Path, out: Path) -> tuple[dict[str, float], list[dict[str, Any]], int]:
    """What the report cost, the causes that are a rank's, and how many steps these were looked for in."""
    seconds, used, megabytes = run("report", directory, "--json", out)
    (target,) = json.loads(out.read_text())["targets"]
    cost = {"seconds": round(seconds, 2), "cpu_seconds": round(used, 2), "rss_mb": round(megabytes)}
    return cost, [cause for cause in target["diagnosis"]["causes"] if cause["ranks"]], target["diagnosis"]["steps"]


def pipelines(directory: Path, out: Path, steps: int) -> list[dict[str, float]]:
    """What reports on `PIPELINES` cost behind their imports, the quickest of three."""
    found = []
    for stages, replicas, microbatches in PIPELINES:
        world = WorldLayout(ParallelSizes(pp=stages, dp=replicas))
        slow = Slow(rank=stages * replicas // 2, from_step=steps // 2, factor=1.2)
        write_timelines(directory, world, steps=steps, microbatches=microbatches, slow=[slow], tails=0.01, seed=stages)
        free = [min(each) for each in zip(*(imported() for _ in range(3)), strict=True)]
        cost = [min(each) for each in zip(*(run("report", directory, "--json", out) for _ in range(3)), strict=True)]
        shutil.rmtree(directory)
        seconds, used = (round(most - least, 2) for most, least in zip(cost[:2], free, strict=False))
        found.append({"stages": stages, "replicas": replicas, "microbatches": microbatches})
        found[-1] |= {"seconds": seconds, "cpu_seconds": used, "rss_mb": round(cost[2])}
        print(f"PP={stages}, {microbatches} microbatches, {replicas} replicas: {seconds} s, {used} s of processors")
    return found


def truth(found: list[dict[str, Any]], world: WorldLayout, injected: list[Slow], apart: int) -> tuple[int, int]:
    """How many of the injected were found with ranks and step, and how many others were named. The report looks into
    steps that lie ``apart``, and names the first of those."""
    right = 0
    for slow in injected:
        right += any(
            each["kind"] == "slow_rank"
            and set(each["ranks"]) == coupled(world, slow.rank or 0)
            and each["since"] is not None
            and 0 <= each["since"] - slow.from_step < apart
            for each in found
        )
    return right, len(found) - right


def select_and_name(ranks: int) -> dict[str, float]:
    """Every rank's own decision and name, as 16,384 processes make them; and all of them at once, as a report does."""
    world = layout(ranks)
    begin = time.perf_counter()
    everybody = [world.coords(rank) for rank in range(ranks)]
    coords = time.perf_counter() - begin
    begin = time.perf_counter()
    for text in SELECTIONS:
        selector = parse_selector(text)
        selector.check(world.sizes, world)
        own = [each.rank for each in everybody if selector.selects(each)]
        if own != selector.ranks(world.sizes, world):
            raise SystemExit(f"{text}: the ranks' own decisions are not what the whole is")
    select = time.perf_counter() - begin
    begin = time.perf_counter()
    names = {Window("train_actor", None, 5, each).path("/save", ".x") for each in everybody}
    name = time.perf_counter() - begin
    folders = collections.Counter(path.parent for path in names)
    if len(names) != ranks or max(folders.values()) > 1024:
        raise SystemExit("names are not unique, or a folder is too full")
    return {"coords_seconds": round(coords, 3), "select_seconds": round(select, 3), "name_seconds": round(name, 3)}


def size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=16384, help="a multiple of 1,024")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--table", action="store_true", help="print the load on a file system, and nothing else")
    options = parser.parse_args()
    if options.table:
        from tests.benchmarks import load

        print(load.table())
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was written is removed then, too
    figures: dict[str, Any] = {"ranks": options.ranks, "steps": options.steps, **select_and_name(options.ranks)}
    print(
        f"{options.ranks:,} ranks: coordinates {figures['coords_seconds']} s, {len(SELECTIONS)} selections "
        f"{figures['select_seconds']} s, names {figures['name_seconds']} s"
    )
    growth = []
    found = wrong = 0
    counts = sorted({max(1024, options.ranks // 16), max(1024, options.ranks // 4), options.ranks})
    with tempfile.TemporaryDirectory() as folder:
        job, out = Path(folder, "job"), Path(folder, "report.json")
        for ranks in counts:
            generated = generate(job, ranks, options.steps)
            cost, named, looked = report(job, out)
            world = layout(ranks)
            right, others = truth(named, world, stragglers(world, options.steps), -(-options.steps // looked))
            found, wrong = found + right, wrong + others
            growth.append({"ranks": ranks, **cost})
            print(
                f"{ranks:6,} ranks, {size(job) / 1e6:7.1f} MB: written {generated:.1f} s, report {cost['seconds']} s "
                f"({cost['cpu_seconds']} s of processors), {cost['rss_mb']} MB; {right} of 2 stragglers found, "
                f"{others} others named"
            )
            if ranks == options.ranks:
                figures |= {
                    "seconds": cost["seconds"],
                    "peak_rss_mb": cost["rss_mb"],
                    "generate_seconds": round(generated, 1),
                    "timeline_mb": round(size(job) / 1e6, 1),
                    "bytes_per_rank_step": round(size(job) / ranks / options.steps),
                }
                seconds, used, megabytes = run("export", job, "--parquet", Path(folder, "out"))
                print(f"export {seconds:.1f} s ({used:.1f} s of processors), {megabytes:.0f} MB")
                figures |= {
                    "export_seconds": round(seconds, 2),
                    "export_cpu_seconds": round(used, 2),
                    "export_rss_mb": round(megabytes),
                    "export_mb": round(size(Path(folder, "out")) / 1e6, 1),
                }
            shutil.rmtree(job)
        generate(job, options.ranks, options.steps, healthy=True)
        _, named, _ = report(job, out)
        print(f"healthy: {len(named)} named")
        shutil.rmtree(job)
        if options.ranks == parser.get_default("ranks"):
            figures["pipelines"] = pipelines(job, out, options.steps)
    figures |= {
        "growth": growth,
        "stragglers_injected": 2 * len(counts),
        "stragglers_found": found,
        "others_named": wrong,
        "named_in_a_healthy_job": len(named),
    }
    print(json.dumps(figures))
    if found != 2 * len(counts) or wrong or named:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

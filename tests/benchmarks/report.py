"""How fast are traces read? Ours against HTA 0.5.0 and against the floor, on the same synthetic GPU trace.

* ours: ``megaprof.analyze`` with one process, from the compressed file to causes.
* HTA: its loader and ``get_temporal_breakdown`` (busy, idle and communication time of the GPU), nothing else.
* floor: the file decompressed (isal) and decoded to typed events (msgspec), a piece at a time, each thrown away at
  once. No reader that looks at every event can do less. To keep all events for a moment instead asks for ten times as
  many fresh pages of memory, and what the system takes for a page differs between machines.

Each runs in a process of its own, imports not counted; the quickest of several rounds counts, taken in turn so that
other load on the machine disturbs all alike. The last line is JSON: ``vs_hta`` and ``vs_floor`` (their time, and ours,
as a multiple: above 1 is good for the first, and 1 is the best possible for the second on one core; ``_cpu``: the same
in processor time, which other load disturbs less; ``_user``: without what the system takes to hand out memory, which
differs most between machines), ``rss_vs_hta`` (our peak memory over HTA's), how time and memory grow with the number of
traces, and our peak memory on one trace of each of ``--sizes`` megabytes of JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from isal import igzip

ROOT = Path(__file__).parents[2]
COLLECTIVE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, "
    "std::array<char*, {}ul> >(int, at::native::CUDAFunctor_add<c10::BFloat16>)"
)
BASE = 1_790_000_000_000_000_000

_MEASURE = """
import json, resource, sys, time
{imports}
path = sys.argv[1]
begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
{work}
seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
rss = max(after.ru_maxrss, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
pages = after.ru_minflt - before.ru_minflt
print(json.dumps({{"seconds": seconds, "cpu": user + system, "user": user, "pages": pages, "rss_mb": rss / 1024}}))
"""
OURS = (
    "from megaprof.analysis.report.report import analyze",
    "report = analyze(path)\nassert report.targets[0].stages",
)
ALL_OURS = (
    "import os\nfrom megaprof.analysis.report.report import analyze",
    "assert __name__ == '__main__'\nanalyze(path, workers=os.cpu_count())",
)
FLOOR = (
    "import msgspec\nfrom pathlib import Path\nfrom isal import igzip\n"
    "from megaprof.analysis.trace.decoding import Event\nfrom megaprof.formats.inputs import PIECE\n",
    # The traces of this benchmark have one event a line.
    "decode = msgspec.json.Decoder(list[Event]).decode\n"
    "for f in Path(path).iterdir():\n"
    "    with igzip.open(f) as file:\n"
    "        rest = file.read(PIECE).partition(b'\"traceEvents\": [')[2]\n"
    "        while piece := file.read(PIECE):\n"
    "            whole, _, rest = (rest + piece).rpartition(b',\\n')\n"
    "            assert decode(b'[' + whole + b']')\n"
    "        assert decode(b'[' + rest.removesuffix(b'}'))",
)
HTA = (
    "from hta.trace_analysis import TraceAnalysis",
    "print(TraceAnalysis(trace_dir=path).get_temporal_breakdown(visualize=False), file=sys.stderr)",
)


def events(rank: int, stages: int, microbatches: int, kernels: int, seed: int = 0) -> Iterator[str]:
    """The events of one rank's step, as Kineto writes them; ``kernels``: in each pass."""
    rng = random.Random(seed)
    now, correlation = 1000.0, 1
    place = f"pp={rank} tp=0 cp=0 ep=0 dp=0"
    length = microbatches * 2 * kernels * 24.0 + 1000
    yield _event(
        "X", "user_annotation", f"megaprof/train_actor step=5 {place}", 7, 7, 900.0, length, '"External id": 1'
    )
    for microbatch in range(microbatches):
        for phase, thread in (("forward", 7), ("backward", 99)):
            name = f"megaprof/{phase} mb={microbatch} chunk=0"
            yield _event("X", "user_annotation", name, 7, 7, now, kernels * 24.0 - 4, '"External id": 2')
            for number in range(kernels):
                begin = now + number * 24.0 + rng.random()
                ids = f'"External id": {correlation}, "Record function id": 0, "Ev Idx": {correlation}'
                operator = ("aten::mm", "aten::add_", "aten::native_layer_norm", "aten::copy_")[number % 4]
                yield _event("X", "cpu_op", operator, 7, thread, begin, 18.0, ids)
                yield _event("X", "cpu_op", "aten::empty", 7, thread, begin + 1, 2.0, ids)
                launch = f'"External id": {correlation}, "cbid": 211, "correlation": {correlation}'
                yield _event("X", "cuda_runtime", "cudaLaunchKernel", 7, thread, begin + 4, 5.0, launch)
                flow = f'"id": {correlation}, "cat": "ac2g", "name": "ac2g"'
                yield f'{{"ph": "s", {flow}, "pid": 7, "tid": {thread}, "ts": {begin + 4:.3f}}}'
                yield f'{{"ph": "f", {flow}, "pid": 0, "tid": 7, "ts": {begin + 12:.3f}, "bp": "e"}}'
                collective, stream = number % 50 == 49, 20 if number % 50 == 49 else 7
                kernel = COLLECTIVE if collective else ELEMENTWISE.format(number % 3)
                details = (
                    f'"External id": {correlation}, "queued": 0, "device": 0, "context": 1, "stream": {stream}, '
                    f'"correlation": {correlation}, "registers per thread": 32, "shared memory": 0, '
                    '"blocks per SM": 1.2, "warps per SM": 4.8, "grid": [160, 1, 1], "block": [128, 1, 1], '
                    '"est. achieved occupancy %": 8'
                )
                if collective:
                    details += (
                        ', "Collective name": "allreduce", "In msg nelems": 8388608, "Out msg nelems": 8388608, '
                        '"Group size": 8, "dtype": "BFloat16", "Process Group Name": "5", '
                        '"Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP", "Process Group Ranks": "[0, 1]"'
                    )
                duration = 20.0 if collective else 18.0 + rng.random()
                yield _event("X", "kernel", kernel, 0, stream, begin + 12, duration, details)
                correlation += 1
            now += kernels * 24.0


def _event(ph: str, cat: str, name: str, pid: int, tid: int, ts: float, dur: float, args: str) -> str:
    return (
        f'{{"ph": "{ph}", "cat": "{cat}", "name": "{name}", "pid": {pid}, "tid": {tid}, "ts": {ts:.3f}, '
        f'"dur": {dur:.3f}, "args": {{{args}}}}}'
    )


def write_trace(directory: Path, rank: int, stages: int, megabytes: float) -> int:
    """One rank's trace of about ``megabytes``; returns its size uncompressed."""
    microbatches, bytes_per_kernel = 16, 1330
    kernels = max(50, int(megabytes * 1e6 / bytes_per_kernel / (2 * microbatches)))
    described = {
        "version": "0",
        "target": "train_actor",
        "steps": [5, 5],
        "coords": {"rank": rank, "pp": rank, "tp": 0, "cp": 0, "ep": 0, "dp": 0},
        "sizes": {"tp": 2, "pp": stages, "cp": 1, "ep": 1, "dp": 1, "vpp": 1, "etp": 2},
        "schedule": "1f1b" if stages > 1 else "no_pipelining",
        "microbatches": microbatches,
        "chunks": [{"embedding": rank == 0, "layers": 4, "mtp": 0, "loss": rank == stages - 1}],
        "host": "node-1",
        "device": "cuda",
    }
    top = {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": stages},
        "megaprof": described,
        "baseTimeNanoseconds": BASE,
        "traceEvents": [],
    }
    name = f"train_actor.step000005.pp{rank}-tp0-cp0-ep0-dp0.rank{rank:05d}.pt.trace.json.gz"
    size, separator = 0, json.dumps(top).removesuffix("]}")
    with igzip.open(directory / name, "wb", compresslevel=1) as file:
        listed = events(rank, stages, microbatches, kernels, rank)
        while some := ",\n".join(itertools.islice(listed, 4096)):
            size += file.write((separator + some).encode())
            separator = ",\n"
        size += file.write(b"]}")
    return size


def measure(python: str, what: tuple[str, str], path: Path) -> dict[str, float]:
    """Run one of the three in a process of its own."""
    imports, work = what
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "measured.py")
        body = _MEASURE.format(imports=imports, work=work)
        script.write_text(body if what is not ALL_OURS else _guarded(body))
        run = subprocess.run(
            [python, str(script), str(path)], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT), "PATH": ""}
        )
    if run.returncode:
        raise SystemExit(f"{python} failed: {run.stderr[-2000:]}")
    result: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return result


def _guarded(body: str) -> str:
    return "if __name__ == '__main__':\n" + "".join(f"    {line}\n" for line in body.strip().splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=float, default=50.0, help="size of a trace, uncompressed")
    parser.add_argument("--rounds", type=int, default=3, help="0: no comparison")
    parser.add_argument("--growth", type=int, nargs="*", default=[1, 8, 64], help="numbers of traces")
    parser.add_argument(
        "--sizes", type=float, nargs="*", default=[48, 500, 2000], help="megabytes of JSON of one trace"
    )
    parser.add_argument("--hta-python", default=sys.executable, help="interpreter that has HolisticTraceAnalysis")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        one = Path(folder, "one")
        one.mkdir()
        size = write_trace(one, 0, 1, options.megabytes)
        print(f"trace: {size / 1e6:.0f} MB, {sum(f.stat().st_size for f in one.iterdir()) / 1e6:.1f} MB compressed")
        runs: dict[str, list[dict[str, float]]] = {"ours": [], "floor": [], "hta": []}
        for _ in range(options.rounds):
            runs["ours"].append(measure(sys.executable, OURS, one))
            runs["floor"].append(measure(sys.executable, FLOOR, one))
            runs["hta"].append(measure(options.hta_python, HTA, one))
        result = _compared(runs, size) if options.rounds else {}
        growth = []
        for count in options.growth:
            many = Path(folder, f"many{count}")
            many.mkdir()
            for rank in range(count):
                write_trace(many, rank, count, options.megabytes)
            begin = time.perf_counter()
            run = measure(sys.executable, ALL_OURS, many)
            growth.append({"traces": count, "seconds": round(run["seconds"], 3), "rss_mb": round(run["rss_mb"])})
            print(f"{count:4d} traces: {run['seconds']:7.2f} s, largest process {run['rss_mb']:.0f} MB")
            print(f"      ({time.perf_counter() - begin:.1f} s with start and imports)")
            for file in many.iterdir():
                file.unlink()
        sizes = []
        for megabytes in options.sizes:
            large = Path(folder, f"large{megabytes}")
            large.mkdir()
            size = write_trace(large, 0, 1, megabytes)
            run = measure(sys.executable, OURS, large)
            sizes.append({"mb": round(size / 1e6), "seconds": round(run["seconds"], 3), "rss_mb": round(run["rss_mb"])})
            print(f"{size / 1e6:6.0f} MB in one trace: {run['seconds']:7.2f} s, {run['rss_mb']:.0f} MB peak")
            shutil.rmtree(large)
    print(json.dumps({**result, "growth": growth, "sizes": sizes}))


def _compared(runs: dict[str, list[dict[str, float]]], size: int) -> dict[str, float]:
    seconds = {name: min(run["seconds"] for run in each) for name, each in runs.items()}
    cpu, user = ({name: min(run[what] for run in each) for name, each in runs.items()} for what in ("cpu", "user"))
    rss = {name: statistics.median(run["rss_mb"] for run in each) for name, each in runs.items()}
    for name in runs:
        print(
            f"{name:>6}: {seconds[name]:8.3f} s  {size / 1e6 / seconds[name]:7.0f} MB/s  {rss[name]:6.0f} MB peak; "
            f"processor {cpu[name]:.3f} s, of which {user[name]:.3f} s outside the system; "
            f"{runs[name][0]['pages']:,.0f} fresh pages"
        )
    return {
        "vs_hta": round(seconds["hta"] / seconds["ours"], 2),
        "vs_floor": round(seconds["ours"] / seconds["floor"], 2),
        "rss_vs_hta": round(rss["ours"] / rss["hta"], 3),
        "vs_hta_cpu": round(cpu["hta"] / cpu["ours"], 2),
        "vs_floor_cpu": round(cpu["ours"] / cpu["floor"], 2),
        "vs_hta_user": round(user["hta"] / user["ours"], 2),
        "vs_floor_user": round(user["ours"] / user["floor"], 2),
    }


if __name__ == "__main__":
    main()

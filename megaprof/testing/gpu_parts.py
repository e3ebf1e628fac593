"""The parts of `megaprof.testing.gpu`, each run as ``python -m megaprof.testing.gpu_parts NAME WORK [--cpu]``.

A part takes an empty directory and whether this is a rehearsal without a GPU, and returns its figures and its checks
(name to whether it held). Whatever it raises is its failure.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megaprof.analysis.report.report import analyze
from megaprof.analysis.trace.calls import calls_of
from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.artifacts.kernels import summarise
from megaprof.capture.session import Session
from megaprof.formats import codes
from megaprof.formats.ranges import FORWARD
from megaprof.formats.timeline import SUFFIX, read_timeline
from megaprof.install import install_hooks
from megaprof.testing.gpt import BuiltGPT, build
from megaprof.testing.gpu_job import Stopwatch, config, hooked, machine, steps_from, train, workload
from megaprof.testing.launcher import init_distributed, run_ranks
from megaprof.testing.workload import GPTWorkload

Found = tuple[dict[str, Any], dict[str, bool]]
"""Figures and checks."""

WARM = 4
_BLOCKS, _STEPS = 6, 5
"""How often each kind of recording takes its turn, and for how many steps."""


def capture(work: Path, cpu: bool) -> Found:
    with machine(cpu, work / "store") as device:
        gpt, watch = build(workload(cpu), device), Stopwatch()
        train(gpt, WARM, watch)
        watch.take()
        train(gpt, _STEPS, watch)
        plain = statistics.median(watch.take())
        with hooked(gpt, config(work / "traces", cpu, kernels=True, **steps_from(gpt, 3))) as handle:
            train(gpt, 3)
            summary = handle.kernel_summary(60.0)
        with torch.profiler.profile(activities=_activities(cpu)) as profiler:
            train(gpt, 1)
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(work / "own.json"))
        # Rows of operators hold the time of the kernels that they launched, which have rows of their own.
        rows = [row for row in profiler.key_averages() if str(row.device_type) == "DeviceType.CUDA"]
        averages = (
            sum(float(row.self_device_time_total) for row in rows if not getattr(row, "is_user_annotation", False))
            / 1e3
        )
    with (work / "own.json").open() as file:
        ours = sum(each["self_us"] for each in summarise(file)["devices"] if not cpu) / 1e3
    (target,) = analyze(work / "traces").targets
    stage, step = target.measured.stages[0], target.measured.step_time_ms
    figures = {
        "step_ms_by_events": plain,
        "step_ms_in_the_report": step.mean if step else None,
        "compute_ms": stage.compute_ms.mean if stage.compute_ms else None,
        "host_bound_ms": stage.host_bound_ms.mean if stage.host_bound_ms else None,
        "kernels_ms_of_key_averages": averages,
        "kernels_ms_of_the_summary": ours,
    }
    return figures, {
        "the report's step is that of the events": step is not None and (cpu or abs(step.mean / plain - 1) < 0.1),
        "kernels add up as in key_averages()": abs(ours - averages) <= 0.001 * max(averages, 1e-9),
        "a kernel summary came with the window": summary is not None and bool(summary["kernels"]),
        "the report knows what ran on the GPU": cpu or stage.host_bound_ms is not None,
    }


class _Received:
    """An exchange through host memory that still runs."""

    def __init__(self, work: Any, tensor: torch.Tensor, host: torch.Tensor) -> None:
        self.work, self.tensor, self.host = work, tensor, host

    def wait(self, *args: Any) -> bool:
        self.work.wait(*args)
        self.tensor.copy_(self.host)
        return True

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())


def _through_host_memory() -> None:
    """Gloo sends no CUDA tensors: each goes by a copy, as Megatron's exchanges pass them."""
    module = dist.distributed_c10d
    send, receive = module.isend, module.irecv

    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return send(tensor.detach().cpu(), *args, **kwargs)

    def irecv(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        host = torch.empty_like(tensor, device="cpu")
        return _Received(receive(host, *args, **kwargs), tensor, host)

    for owner in (dist, module):
        for function in (isend, irecv):
            setattr(owner, function.__name__, function)


def one_stage(directory: str, cpu: bool, layout: tuple[int, ...], vpp: int | None) -> list[float]:
    """One rank of a pipeline of two on one GPU; its schedule's times while it was captured."""
    init_distributed()
    with machine(cpu, None) as device:
        if not cpu:
            _through_host_memory()
        gpt, watch = build(workload(cpu, pp=2, vpp=vpp, layers=8, layout=layout), device), Stopwatch()
        train(gpt, WARM, watch)
        watch.take()
        with hooked(gpt, config(Path(directory), cpu, **steps_from(gpt, 4))):
            train(gpt, 4, watch)
        return watch.take()


def pipeline(work: Path, cpu: bool, vpp: int | None = None) -> Found:
    built, even = ((6, 2), (4, 4)) if vpp is None else ((3, 1, 3, 1), (2, 2, 2, 2))
    run_ranks(one_stage, 2, str(work / "built"), cpu, built, vpp, timeout=120)
    again = run_ranks(one_stage, 2, str(work / "even"), cpu, even, vpp, timeout=120)
    (target,) = analyze(work / "built").targets
    measured = max(map(statistics.median, again))
    other = next((each for each in target.what_if.candidates if each.what == "4+4 layers"), None)
    traces = [read_trace(path) for path in find_traces(work / "built")]
    passes = [phase for trace in traces for phase in trace.ranges if phase.name.label in ("forward", "backward")]
    step, error = target.measured.step_time_ms, target.what_if.replay_error
    figures = {
        "slowest_stage": target.verdict.slowest_stage,
        "imbalance": target.verdict.imbalance,
        "step_ms": step.mean if step else None,
        "replay_error": error.mean if error else None,
        "predicted_ms_of_4+4": other.step_ms if other else None,
        "plus_or_minus_ms": other.uncertainty_ms if other else None,
        "re-run_ms_of_4+4": measured,
    }
    return figures, {
        "the slow stage is stage 0": target.verdict.slowest_stage == 0 or cpu,
        "every microbatch has its passes": len(passes)
        == 2 * 2 * (vpp or 1) * len(traces) // 2 * workload(cpu).microbatches,
        "the re-run is inside the prediction": cpu
        or (other is not None and abs(other.step_ms - measured) <= other.uncertainty_ms),
        "kernels belong to their launch": cpu or all(trace.gpu is not None for trace in traces),
    }


def interleaved(work: Path, cpu: bool) -> Found:
    return pipeline(work, cpu, 2)


class _Cuda:
    """In a rehearsal: CUDA calls that no CPU has, which do nothing."""

    def __init__(self) -> None:
        self.opened = 0

    def cudaProfilerStart(self) -> int:
        self.opened += 1
        return 0

    def cudaProfilerStop(self) -> int:
        return 0

    def __call__(self) -> _Cuda:
        return self


@contextlib.contextmanager
def faked(cpu: bool, answers: dict[str, Any]) -> Iterator[None]:
    """In a rehearsal ``torch`` has these attributes as well, such as ``cuda.is_initialized``."""
    with contextlib.ExitStack() as stack:
        for name, value in answers.items() if cpu else ():
            stack.enter_context(patch(f"torch.{name}", value, create=True))
        yield


def cost(work: Path, cpu: bool) -> Found:
    modes: dict[str, dict[str, Any] | None] = {
        "off": None,
        "armed": {"steps": "1000000"},
        "ranges": {"tool": ("nsys",)},
        "cuda_only": {} if cpu else {"activities": ("cuda",)},
        "full": {"record_shapes": True, "with_stack": True},
        "timeline": {"tool": ("timeline",)},
    }
    took: dict[str, list[float]] = {name: [] for name in modes}
    blocked: list[float] = []
    end = Session.end

    def timed_end(self: Session, *args: Any, **kwargs: Any) -> None:
        began = time.perf_counter()
        end(self, *args, **kwargs)
        blocked.append((time.perf_counter() - began) * 1e3)

    usual: dict[str, list[float]] = {}
    steps = 2 if cpu else _STEPS
    calls = {"cuda.is_initialized": lambda: True, "cuda.cudart": _Cuda()}
    with machine(cpu, work / "store") as device, faked(cpu, calls):
        gpt = build(workload(cpu), device)
        train(gpt, WARM)
        for block in range(1 if cpu else _BLOCKS):
            for name, options in modes.items():
                directory = work / f"{name}{block}"
                wanted = None if options is None else config(directory, cpu, **{**steps_from(gpt, steps), **options})
                hooks = hooked(gpt, wanted) if wanted else None
                blocked.clear()
                with patch.object(Session, "end", timed_end), hooks or contextlib.nullcontext():
                    for _ in range(steps):
                        torch.cuda.synchronize()
                        began = time.perf_counter()
                        gpt.train_step()
                        torch.cuda.synchronize()
                        took[name].append((time.perf_counter() - began) * 1e3)
                usual.setdefault(name, []).extend(blocked)
        theirs = _theirs(gpt, work / "theirs", cpu)
        both = config(work / "both", cpu, tool=("torch", "timeline"), **steps_from(gpt, 3))
        with hooked(gpt, both):
            train(gpt, 3)
    apart = _by_kineto(work / "both"), _by_timeline(work / "both")
    figures: dict[str, Any] = {f"{name}_ms": statistics.median(each) for name, each in took.items()}
    figures |= {
        "window_end_ms": statistics.median(usual["full"]),
        "window_end_ms_of_tensorboard_trace_handler": theirs,
        "forward_ms_by_kineto": apart[0],
        "forward_ms_by_the_timeline": apart[1],
    }
    return figures, {
        "a window ends sooner than torch's handler": figures["window_end_ms"] < theirs,
        "armed costs less than 1 % of the step": cpu or figures["armed_ms"] < 1.01 * figures["off_ms"],
        "the timeline's forwards are Kineto's within 2 %": cpu or abs(apart[1] / apart[0] - 1) < 0.02,
    }


def _theirs(gpt: BuiltGPT, directory: Path, cpu: bool) -> float:
    """Milliseconds that the end of torch's own profiler blocks."""
    handler = torch.profiler.tensorboard_trace_handler(str(directory), use_gzip=True)
    given: dict[str, Any] = {"activities": _activities(cpu), "record_shapes": True, "with_stack": True}
    with torch.profiler.profile(**given, on_trace_ready=handler):
        gpt.train_step()
        began = time.perf_counter()
    return (time.perf_counter() - began) * 1e3


def _activities(cpu: bool) -> list[torch.profiler.ProfilerActivity]:
    return [torch.profiler.ProfilerActivity.CPU] + ([] if cpu else [torch.profiler.ProfilerActivity.CUDA])


def _by_kineto(directory: Path) -> float:
    """Milliseconds between the ends of the forwards of a step, the median of the captured steps."""
    calls = [call for path in find_traces(directory) for call in calls_of(read_trace(path))]
    return statistics.median(
        sum(each.end - each.start for each in call.phases if each.kind == FORWARD) / 1e6 for call in calls
    )


def _by_timeline(directory: Path) -> float:
    """The same of the timeline, of the same steps."""
    (path,) = directory.glob(f"*{SUFFIX}")
    timeline, found = read_timeline(path), []
    for position in range(len(timeline.steps)):
        events = timeline.events(position)
        if events is not None:
            forwards = events.code & codes.KIND_MASK == codes.FORWARD
            found.append(float((events.end - events.start)[forwards].sum()) / 1e3)
    return statistics.median(found)


class _Graph:
    """In a rehearsal: a CUDA graph that captures nothing."""

    replays = 0

    def register_generator_state(self, state: object) -> None: ...

    def replay(self) -> None:
        _Graph.replays += 1


def graphs(work: Path, cpu: bool) -> Found:
    figures: dict[str, Any] = {}
    checks: dict[str, bool] = {}
    nothing: dict[str, Any] = {
        "cuda.CUDAGraph": _Graph,
        "cuda.graph": lambda *_, **__: contextlib.nullcontext(),
        "cuda.graph_pool_handle": lambda: None,
        "cuda.empty_cache": lambda: None,
    }
    with machine(cpu, work / "store") as device, faked(cpu, nothing):
        for name, part in {"full-iteration": _whole_graph, "single layers": _layer_graphs}.items():
            try:
                figures[name], checks[name] = part(work / name, cpu, device)
            except Exception as fault:
                figures[name], checks[name] = f"failed: {type(fault).__name__}: {fault}"[:300], False
    return figures, checks


def _whole_graph(directory: Path, cpu: bool, device: str) -> tuple[str, bool]:
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper
    from megatron.core.pipeline_parallel import get_forward_backward_func

    gpt = build(workload(cpu), device)

    def forward_step(iterator: Iterator[Any], model: Any) -> Any:
        batch = next(iterator)
        return gpt.forward_step(iter([(batch["tokens"], batch["labels"])]), model)

    count = gpt.workload.microbatches
    with install_hooks(gpt.chunks, config(directory, cpu, skip_first=0, repeat=0)):
        wrapper = FullCudaGraphWrapper(get_forward_backward_func(), cuda_graph_warmup_steps=2)
        for step in range(5):
            batches = ({"tokens": tokens, "labels": labels} for tokens, labels in gpt.data_iterator(step))
            wrapper(
                forward_step_func=forward_step,
                data_iterator=batches,
                model=gpt.chunks,
                num_microbatches=count,
                seq_length=gpt.workload.seq_length,
                micro_batch_size=gpt.workload.micro_batch_size,
                forward_only=False,
            )
    found = {trace.metadata.steps[0]: trace.metadata.ranges for trace in map(read_trace, find_traces(directory))}
    replayed = [step for step, each in found.items() if not each.microbatch and "CUDA graph" in (each.reason or "")]
    return f"steps captured {sorted(found)}, of them replayed {sorted(replayed)}", sorted(replayed) == [3, 4]


def _layer_graphs(directory: Path, cpu: bool, device: str) -> tuple[str, bool]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from megaprof.testing import gpt as building

    if cpu:
        return "not rehearsed: tests/hooks/test_layer_graphs.py does, with replaced CUDA calls", True
    configure = building._config

    def configured(asked: GPTWorkload) -> Any:
        made = configure(asked)
        made.cuda_graph_impl = "local"
        return made

    with patch.object(building, "_config", configured):
        get_cuda_rng_tracker(use_cudagraphable_rng=True)
        gpt = build(workload(cpu), device)
    with install_hooks(gpt.chunks, config(directory, cpu, skip_first=0, repeat=0, ranges="module")):
        train(gpt, 5)
    metadata = [read_trace(path).metadata for path in find_traces(directory)]
    said = sorted({each.reason for one in metadata for each in one.ranges.without})
    return f"{len(metadata)} windows; {'; '.join(said)}", any("CUDA graph" in each for each in said)


def memory(work: Path, cpu: bool) -> Found:
    observers: list[Callable[[int, int, int, int], None]] = []
    answers: dict[str, Any] = {
        "cuda.is_initialized": lambda: True,
        "cuda.memory._record_memory_history": lambda *_, **__: None,
        "cuda.memory._snapshot": lambda: {"segments": [], "device_traces": [[]]},
        "_C._cuda_attach_out_of_memory_observer": observers.append,
        "_C._cuda_isHistoryEnabled": lambda: False,
    }
    with machine(cpu, work / "store") as device, faked(cpu, answers):
        gpt = build(workload(cpu), device)
        train(gpt, WARM)

        def run_out() -> None:
            if cpu:
                observers[0](0, 1 << 40, 0, 0)
            else:
                with contextlib.suppress(torch.OutOfMemoryError):
                    torch.empty(1 << 42, dtype=torch.uint8, device="cuda")

        forward = gpt.forward_step

        def failing(*args: Any, **kwargs: Any) -> Any:
            run_out()
            return forward(*args, **kwargs)

        gpt.forward_step = failing  # type: ignore[method-assign]
        with hooked(gpt, config(work / "files", cpu, tool=("memory",), **steps_from(gpt, 1))):
            train(gpt, 1)
    sizes = {path.name.partition("rank00000")[2]: path.stat().st_size for path in (work / "files").glob("*.pickle")}
    return {name.strip("."): size for name, size in sizes.items()}, {
        "a snapshot of the window": ".memory.pickle" in sizes,
        "a snapshot on out of memory": ".oom.memory.pickle" in sizes,
    }


def nsys(work: Path, cpu: bool) -> Found:
    fake = _Cuda()
    calls = {"cuda.is_initialized": lambda: True, "cuda.cudart": fake}
    with machine(cpu, work / "store") as device, faked(cpu, calls):
        gpt = build(workload(cpu), device)
        train(gpt, WARM)
        wanted = config(work / "files", cpu, tool=("nsys",), **steps_from(gpt, 2))
        with hooked(gpt, wanted):
            train(gpt, 2)
    windows = len(list((work / "files").glob("*.nsys.json")))
    figures: dict[str, Any] = {"windows": windows}
    checks = {"two windows were opened and closed": windows == 2 and (not cpu or fake.opened == 2)}
    tool = shutil.which("nsys")
    if tool is None or cpu:
        return figures | {"nsys": "not on PATH" if tool is None else "left out of a rehearsal"}, checks
    inner = [sys.executable, "-m", "megaprof.testing.gpu_parts", "nsys_inside", str(work / "inside")]
    (work / "inside").mkdir()
    options = [
        "--trace=cuda,nvtx",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=repeat:2",
        "--export=sqlite",
    ]
    subprocess.run([tool, "profile", *options, "-o", str(work / "seen"), *inner], check=True, timeout=100)
    seen = sorted(path.name for path in work.glob("seen*.sqlite"))
    return figures | {"nsys": seen}, checks | {"nsys saw each window": len(seen) == 2}


def nsys_inside(work: Path, cpu: bool) -> Found:
    """The job that nsys starts."""
    with patch("shutil.which", lambda *_: None):
        return nsys(work, cpu)


def compiled(work: Path, cpu: bool) -> Found:
    with machine(cpu, work / "store") as device:
        gpt = build(workload(cpu), device)
        for layer in gpt.chunks[0].module.modules():
            if type(layer).__name__ == "TransformerLayer":
                layer.compile()
        train(gpt, WARM)
        before = gpt.parameter_digest()
        with hooked(gpt, config(work / "traces", cpu, ranges="module", **steps_from(gpt, 1))):
            losses = train(gpt, 1)
    metadata = [read_trace(path).metadata for path in find_traces(work / "traces")]
    said = sorted({each.reason for one in metadata for each in one.ranges.without})
    return {"windows": len(metadata), "said": said, "loss": losses[0]}, {
        "captured": len(metadata) == 1,
        "said": cpu or any("compile" in each for each in said),
        "trained": gpt.parameter_digest() != before,
    }


def overlap(work: Path, cpu: bool) -> Found:
    with machine(cpu, work / "store") as device:
        gpt = build(workload(cpu, overlap_grad_reduce=True), device)
        train(gpt, WARM)
        with hooked(gpt, config(work / "traces", cpu, **steps_from(gpt, 1))):
            train(gpt, 1)
    (path,) = find_traces(work / "traces")
    with gzip.open(path, "rt") if path.suffix == ".gz" else io.StringIO(path.read_text()) as file:
        events = json.load(file)["traceEvents"]
    groups = sorted(
        {str(name) for each in events if (name := (each.get("args") or {}).get("Process Group Description"))}
    )
    kernels = sum("nccl" in str(each.get("name", "")).lower() and each.get("cat") == "kernel" for each in events)
    return {"groups_on_kernels": groups, "nccl_kernels": kernels}, {
        "captured": bool(events),
        "kernels of NCCL name their group": cpu or not kernels or bool(groups),
    }


def main(arguments: list[str]) -> int:
    name, work, *rest = arguments
    figures, checks = globals()[name](Path(work), rest == ["--cpu"])
    (Path(work) / "result.json").write_text(json.dumps({"figures": figures, "checks": checks}))
    return 0


if __name__ == "__main__":
    # As a module of its name, so that ranks can import its functions.
    from megaprof.testing import gpu_parts

    sys.exit(gpu_parts.main(sys.argv[1:]))

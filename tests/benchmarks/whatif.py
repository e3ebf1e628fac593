"""Closing the loop: does a run with the suggested layout gain what `megaprof report` predicted?

Real megatron-core on this CPU. Every captured layout is run once, the report suggests another, and then both run in
alternation in the same processes, several times each, so that a machine whose speed drifts does it to both. Every run
of the captured layout gives a prediction. What is predicted is the speedup. The truth is the median, over all turns,
of the captured layout's step over that of the suggested one: steps that run after the captured ones, without a window,
each from its first forward to the end of its last backward. A barrier precedes every step: the optimizer before it,
whose time depends on the layers too, is no part of the pipeline that is predicted.

Paced layers are the truth: real schedules and exchanges of a tiny model whose layers and output layer take a given time
in each pass, and wait for most of it, as a host waits for a GPU. Waiting needs no core, so a layer costs the same in
every layout. They run
twice: as the machine is, and with one core kept busy. Cores are kept awake meanwhile (`cores.awake`).

Real compute says less: two stages that compute at once may share a physical core, every layout shares it differently,
and so a layer costs something else in each. Its errors have names of their own.

Synthesised: four stages with known costs and noise, from the generator of the tests, for layouts that a small machine
cannot run.

    python -m tests.benchmarks.whatif [--repeats N] [--stages 2 4] [--only paced busy compute synthesised] [--out DIR]

A turn of one layout has 11 steps and takes 10 to 15 s. All of it has about 50 turns: 11 minutes on two quiet cores.
What has not begun after ``--minutes``, or takes longer than a turn may, is left out, and named, so that it ends within
15 on a busy machine, too.

The last line is JSON. ``median_error``: the median of |predicted / measured speedup - 1| over the predictions of the
paced runs, as the machine is (wanted: at most 0.03); ``within_uncertainty``: the part of them whose error is within
their interval (wanted: at least 0.9); ``within_both``: the same, where the scatter of the measured speedup,
added in quadrature, counts too; ``predictions``: how many there are. With ``_busy``, ``_compute`` and
``_synthesised`` at the end: the same of the paced runs with one core busy (wanted alike), of real compute, and of
synthesised pipelines; null where these did not run. ``load`` is the machine's at the start, ``minutes`` what all took.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megaprof.analysis.report.report import analyze
from megaprof.analysis.what_if.changes import Prediction
from megaprof.analysis.what_if.layouts import layers_per_stage, parse_layout
from megaprof.analysis.what_if.what_if import WhatIf
from megaprof.parallel.megatron import language_model
from megaprof.testing import GPTWorkload, RanksFailed, run_ranks
from tests.analysis.scenarios import Scenario, write
from tests.benchmarks.cores import awake, one_busy
from tests.built import Packs, build_packed

Split = tuple[int, ...]

CAPTURED: tuple[Split, ...] = ((6, 2), (2, 6))
#: More stages than cores: only for layers that wait.
DEEPER: tuple[Split, ...] = ((5, 1, 1, 1), (1, 2, 2, 3))
WARM_UP, STEPS = 2, 3
#: Steps of a turn that are the truth.
TIMED = 6
#: Milliseconds of a paced module's forward and of its backward.
PACED_LAYER, PACED_OUTPUT = (6.0, 12.0), (15.0, 10.0)
REAL = GPTWorkload(pp=2, layers=8, microbatches=8)
PACED = GPTWorkload(pp=2, layers=8, microbatches=8, hidden=32, seq_length=16)
TIME_LIMIT = 170.0


@dataclass(frozen=True)
class Outcome:
    """One prediction and what came of it: speedups of the suggested layout over the captured one, from ``low`` to
    ``high``.

    ``advised``: whether the report advised it, because it gains more than its uncertainty; ``scatter``: plus or minus
    of ``measured``, by how the runs differ: more than the interval says that the machine was too busy to tell.
    """

    captured: str
    layout: str
    advised: bool
    replay_error: float
    captured_ms: float
    predicted: float
    low: float
    high: float
    measured: float
    scatter: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0

    @property
    def inside(self) -> bool:
        return self.low <= self.measured <= self.high

    @property
    def inside_both(self) -> bool:
        room = self.predicted - self.low if self.measured < self.predicted else self.high - self.predicted
        return abs(self.predicted - self.measured) <= math.hypot(room, self.scatter)


def run_rank(
    turns: Sequence[tuple[str, GPTWorkload] | tuple[str, GPTWorkload, Packs]],
    out: Path,
    rounds: int,
    paced: Callable[[Sequence[Any]], None] | None,
) -> None:
    """One rank: every workload in turn, with the sequences that its microbatches hold if these are packed, ``rounds``
    times, each with a directory of traces by its name. ``paced`` gives model chunks their times; None: they compute."""
    import torch.distributed
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megaprof import add_profile_args, install_hooks
    from megaprof.testing import build, cpu_megatron, init_distributed

    init_distributed()
    gc.disable()
    steps = ",".join(str(step) for step in range(WARM_UP, WARM_UP + STEPS))
    with cpu_megatron():
        for number in range(rounds):
            for turn, workload, *packs in turns:
                flags = ["--profile-target", "train_actor", "--profile-dir", str(out / name(number, turn))]
                flags += ["--profile-select", "all"]
                flags += ["--profile-steps", f"train_actor={steps}"]
                args = add_profile_args(argparse.ArgumentParser()).parse_args(flags)
                gpt = build_packed(workload, *packs) if packs else build(workload)
                if paced is not None:
                    paced(gpt.chunks)
                gc.collect()  # between turns, as `--manual-gc` has it: else some captured step takes 150 ms longer
                with install_hooks(gpt.chunks, args):
                    forward_backward = get_forward_backward_func()
                    for _ in range(WARM_UP + STEPS):
                        torch.distributed.barrier()
                        gpt.train_step(forward_backward)
                    step_ms = _step_ms(gpt, forward_backward)
                if torch.distributed.get_rank() == 0:
                    truth(out, number, turn).write_text(str(step_ms))
                print(f"round {number + 1} of {rounds}: {turn}", flush=True)


def _step_ms(gpt: Any, forward_backward: Callable[..., Any]) -> float:
    """The median of a few more steps, in milliseconds, each on the rank that takes longest."""
    import torch

    times: list[float] = []

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = forward_backward(*args, **kwargs)
        times.append(1e3 * (time.perf_counter() - begin))
        return result

    for _ in range(TIMED):
        torch.distributed.barrier()
        gpt.train_step(timed)
    longest = torch.tensor(times, dtype=torch.float64)
    torch.distributed.all_reduce(longest, torch.distributed.ReduceOp.MAX)
    return float(longest.median())


def truth(out: Path, number: int, turn: str) -> Path:
    """Where a turn's milliseconds stand."""
    return out / f"{name(number, turn)}.json"


def pace(chunks: Sequence[Any]) -> None:
    """Let every decoder layer and the output layer take a given time in each pass."""
    from megaprof.testing import faults

    faults.pace(faults.layers(chunks), lambda: PACED_LAYER)
    ends = (model.output_layer for model in map(language_model, chunks) if model.post_process)
    faults.pace(ends, lambda: PACED_OUTPUT)


def name(number: int, turn: str) -> str:
    """Of a turn's directory."""
    return f"round{number}-{turn}"


def real(repeats: int, out: Path, splits: Sequence[Split], *, paced: bool) -> tuple[list[Outcome], list[str]]:
    """Outcomes of runs of megatron-core, and why a capture has none."""
    outcomes, missed = [], []
    first = out / "first"
    workload = replace(PACED if paced else REAL, pp=len(splits[0]))
    _run(workload, splits, first, 1, paced)
    pairs = {}
    for split in splits:
        found = _what_if(first / name(0, _plus(split)))
        best = _suggestion(found)
        if best is None or best.layout is None:
            missed.append(f"{_plus(split)}: {'; '.join(each.text for each in found.warnings) or found.advice}")
        else:
            pairs[split] = best.layout
    turns = [each for split, layout in pairs.items() for each in (split, _split(layout, workload.pp))]
    _run(workload, list(dict.fromkeys(turns)), out / "pairs", repeats, paced)
    for split, layout in pairs.items():
        captured = [_what_if(out / "pairs" / name(number, _plus(split))) for number in range(repeats)]
        measured, scatter = measured_speedup(out / "pairs", repeats, _plus(split), _plus(_split(layout, workload.pp)))
        for number, found in enumerate((_what_if(first / name(0, _plus(split))), *captured)):
            label = f"{_plus(split)}, {number}"
            outcome = _outcome(label, found, layout, measured, scatter)
            if outcome is None:
                missed.append(f"{label}: {'; '.join(each.text for each in found.warnings) or found.advice}")
            else:
                outcomes.append(outcome)
    return outcomes, missed


def _run(workload: GPTWorkload, splits: Sequence[Split], out: Path, rounds: int, paced: bool) -> None:
    env = {"KINETO_LOG_LEVEL": "6", "PYTHONWARNINGS": "ignore"}
    if paced:  # what waits shares no core, and must not be less certain for it
        env["LOCAL_WORLD_SIZE"] = "1"
    turns = [(_plus(split), replace(workload, layout=split)) for split in splits]
    run_ranks(
        run_rank,
        workload.pp,
        turns,
        out,
        rounds,
        pace if paced else None,
        timeout=TIME_LIMIT,
        env=env,
        on_line=only_first,
    )


def _plus(split: Split) -> str:
    return "+".join(map(str, split))


def _split(layout: str, stages: int) -> Split:
    return layers_per_stage(parse_layout(layout, stages), stages)


def measured_speedup(out: Path, rounds: int, before: str, after: str) -> tuple[float, float]:
    """Of one turn over another, and twice its standard error."""
    both = ([float(truth(out, number, each).read_text()) for number in range(rounds)] for each in (before, after))
    return _ratio(*both)


def _ratio(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """The median speedup over pairs of turns that followed each other, of their step times in milliseconds, and twice
    its standard error by their scatter."""
    ratios = [a / b for a, b in zip(before, after, strict=True)]
    scatter = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    return statistics.median(ratios), 2 * scatter


def synthesised(count: int) -> Iterator[Outcome]:
    """Four stages, random layers, embedding, loss and noise."""
    rng = random.Random(7)
    while count:
        cuts = sorted(rng.sample(range(2, 31), 3))
        layers = tuple(b - a for a, b in zip((0, *cuts), (*cuts, 32), strict=True))
        noise, loss = rng.uniform(0.01, 0.08), rng.uniform(0.0, 20.0)
        scenario = Scenario(f"synthesised {count}", layers=layers, embedding=2.0, loss=loss, noise=noise, gpu=False)
        found = _of_scenario(scenario)
        best = _suggestion(found)
        if best is None or best.layout is None:
            continue
        after = _of_scenario(replace(scenario, layers=_split(best.layout, 4), seed=1))
        if not found.measured_ms or not after.measured_ms:
            continue
        speedup = _ratio([found.measured_ms], [after.measured_ms])
        outcome = _outcome(_plus(layers), found, best.layout, *speedup)
        if outcome is not None:
            yield outcome
            count -= 1


def _of_scenario(scenario: Scenario) -> WhatIf:
    with tempfile.TemporaryDirectory() as directory:
        write(scenario, Path(directory))
        return _what_if(Path(directory))


def _what_if(directory: Path) -> WhatIf:
    return next(t.what_if for t in analyze(directory).targets if t.target == "train_actor")


def _suggestion(found: WhatIf) -> Prediction | None:
    """The suggested layout; where the machine is too noisy for a suggestion, the one with the shortest step."""
    return found.best or next((each for each in found.candidates if each.kind == "layout"), None)


def _outcome(label: str, found: WhatIf, layout: str, measured: float, scatter: float) -> Outcome | None:
    """None where this capture does not predict the layout."""
    predicted = next((each for each in found.candidates if each.kind == "layout" and each.layout == layout), None)
    if predicted is None or found.replay_error is None or found.measured_ms is None:
        return None
    return Outcome(
        captured=label,
        layout=layout,
        advised=found.best is not None,
        replay_error=found.replay_error.mean,
        captured_ms=found.measured_ms,
        predicted=predicted.speedup.value,
        low=predicted.speedup.low,
        high=predicted.speedup.high,
        measured=measured,
        scatter=scatter,
    )


def only_first(rank: int, line: str) -> None:
    if rank == 0 and line.startswith("round "):
        print(f"  {line.rstrip()} (load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)", flush=True)


def show(title: str, outcomes: Sequence[Outcome]) -> None:
    print(title)
    for each in outcomes:
        measured = f"{each.measured:.3f} ± {each.scatter:.3f}"
        print(
            f"  {each.captured:18} {each.captured_ms:7.0f} ms, replay {each.replay_error:+6.1%} -> {each.layout:22} "
            f"predicted {each.predicted:.3f} ({each.low:.3f} to {each.high:.3f}), measured {measured}: "
            f"{each.error:+6.1%}{'' if each.inside else ' OUTSIDE'}{'' if each.advised else ' (not advised)'}"
        )


def figures(outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, float | None]:
    """Of each kind; those of paced runs have the plain names."""
    found: dict[str, float | None] = {}
    for kind, each in outcomes.items():
        label, errors = "" if kind == "paced" else f"_{kind}", [abs(one.error) for one in each]
        found |= {
            f"median_error{label}": statistics.median(errors) if errors else None,
            f"within_uncertainty{label}": _share([one.inside for one in each]),
            f"within_both{label}": _share([one.inside_both for one in each]),
            f"predictions{label}": len(each),
        }
    return found


def _share(inside: Sequence[bool]) -> float | None:
    return statistics.fmean(inside) if inside else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2, help="runs of each layout (default: 2)")
    parser.add_argument("--synthesised", type=int, default=5, help="synthesised pipelines (default: 5)")
    kinds = ("paced", "busy", "compute", "synthesised")
    parser.add_argument("--only", choices=kinds, nargs="*", default=kinds, help="only these (default: all)")
    stages = tuple(len(splits[0]) for splits in (CAPTURED, DEEPER))
    parser.add_argument(
        "--stages", type=int, choices=stages, nargs="*", default=stages, help="pipelines (default: both)"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="nothing begins after so many (default: 8)")
    parser.add_argument("--out", type=Path, default=None, help="keep the traces there")
    options = parser.parse_args()
    load, begin = os.getloadavg()[0], time.monotonic()
    outcomes: dict[str, list[Outcome]] = {kind: [] for kind in kinds}
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch)
        for kind in options.only:
            if kind == "synthesised":
                outcomes[kind] += synthesised(options.synthesised)
            every = {"compute": (CAPTURED,), "synthesised": ()}.get(kind, (CAPTURED, DEEPER))
            for splits in (each for each in every if len(each[0]) in options.stages):
                if time.monotonic() - begin > 60 * options.minutes:
                    missed.append(f"{kind}, {len(splits[0])} stages: left out, {options.minutes:g} minutes were over")
                    continue
                place = out / kind / str(len(splits[0]))
                paced = kind != "compute"
                try:
                    with awake() if paced else nullcontext(), one_busy() if kind == "busy" else nullcontext():
                        found, reasons = real(options.repeats, place, splits, paced=paced)
                except RanksFailed as fault:
                    if all(each.outcome != "hung" for each in fault.reports):
                        raise  # nobody ran into the time limit
                    found, reasons = [], [f"{len(splits[0])} stages: left out, its turns took over {TIME_LIMIT:g} s"]
                outcomes[kind] += found
                missed += [f"{kind}, {reason}" for reason in reasons]
    for kind, each in outcomes.items():
        show(f"{kind}:", each)
    for reason in missed:
        print(f"  no prediction: {reason}")
    result: dict[str, Any] = {"benchmark": "whatif", **figures(outcomes)}
    result |= {
        "repeats": options.repeats,
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "no_prediction": len(missed),
        "load": load,
        "outcomes": {kind: [asdict(each) for each in own] for kind, own in outcomes.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

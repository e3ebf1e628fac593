"""Closing the loop: does a run with the suggested layout take what `megaprof report` predicted?

Real: megatron-core on this CPU, two stages. Layouts 6+2 and 2+6 are captured, the report suggests another, and that one
was run and captured in the same processes, so that all of them met the same machine; repeated, since a shared machine's
speed drifts. Captured steps are compared with captured steps. A barrier precedes every step: the optimizer before it,
whose time depends on the layers too, is no part of the pipeline that is predicted.

Paced: the same, real schedules and exchanges too, but of a tiny model whose layers and output layer wait for a given
time in each pass, as a host waits for a GPU. Waiting needs no core, so this also holds on a machine that others use.

Synthesised: four stages with known costs and noise, from the generator of the tests, for layouts that a small machine
cannot run.

    python -m tests.benchmarks.whatif [--repeats N] [--out DIR]

The last line is JSON. ``median_error`` is the median of |predicted / measured - 1| over the layouts that were
suggested in real runs (wanted: 0.05), ``median_error_all`` also over those whose gain was within the uncertainty,
``median_error_paced`` and ``median_error_synthesised`` that of the other runs; ``error_of_medians`` compares the median
prediction with the median measurement of the real runs; ``load`` is the machine's at the start.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megaprof.analysis.report.report import analyze
from megaprof.analysis.what_if.layouts import layers_per_stage, parse_layout
from megaprof.analysis.what_if.what_if import Prediction, WhatIf
from megaprof.parallel.chunks import language_model
from megaprof.testing import GPTWorkload, run_ranks
from tests.analysis.scenarios import Scenario, write

Split = tuple[int, ...]

CAPTURED: tuple[Split, ...] = ((6, 2), (2, 6))
#: What may be suggested for them; a suggestion of anything else is counted as not run.
SUGGESTED: tuple[Split, ...] = ((3, 5), (4, 4), (5, 3))
WARM_UP, STEPS = 2, 3
#: Milliseconds that a paced module waits in a forward and in a backward.
PACED_LAYER, PACED_OUTPUT = (6.0, 12.0), (15.0, 10.0)
REAL = GPTWorkload(pp=2, layers=8, microbatches=8)
PACED = GPTWorkload(pp=2, layers=8, microbatches=8, hidden=32, seq_length=16)
TIME_LIMIT = 900.0


@dataclass(frozen=True)
class Outcome:
    """One prediction and what came of it; ``uncertainty`` and ``error`` as fractions of the measured step.

    ``gains``: the report suggested it, because it gains more than its uncertainty.
    """

    captured: str
    suggested: str
    gains: bool
    replay_error: float
    captured_ms: float
    predicted_ms: float
    measured_ms: float
    uncertainty: float
    error: float


def run_rank(workload: GPTWorkload, splits: Sequence[Split], out: Path, rounds: int, paced: bool) -> None:
    """One rank: every split in turn, ``rounds`` times, each with its own directory of traces."""
    import torch.distributed
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megaprof import add_profile_args, install_hooks
    from megaprof.testing import build, cpu_megatron, init_distributed

    init_distributed()
    steps = ",".join(str(step) for step in range(WARM_UP, WARM_UP + STEPS))
    with cpu_megatron():
        for number in range(rounds):
            for split in splits:
                flags = ["--profile-target", "train_actor", "--profile-dir", str(out / name(number, split))]
                flags += ["--profile-select", "per-stage"]
                flags += ["--profile-steps", f"train_actor={steps}"]
                args = add_profile_args(argparse.ArgumentParser()).parse_args(flags)
                gpt = build(replace(workload, layout=split))
                if paced:
                    pace(gpt.chunks)
                with install_hooks(gpt.chunks, args):
                    forward_backward = get_forward_backward_func()
                    for _ in range(WARM_UP + STEPS):
                        torch.distributed.barrier()
                        gpt.train_step(forward_backward)
                print(f"round {number + 1} of {rounds}: {'+'.join(map(str, split))}", flush=True)


def pace(chunks: Sequence[Any]) -> None:
    """Let every decoder layer and the output layer wait in each pass."""
    import torch

    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Any, forward_ms: float, backward_ms: float) -> Any:
            ctx.backward_ms = backward_ms
            time.sleep(forward_ms / 1000)
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            time.sleep(ctx.backward_ms / 1000)
            return gradient, None, None

    def waiting(times: tuple[float, float]) -> Any:
        return lambda module, inputs, output: (Wait.apply(output[0], *times), *output[1:])

    for chunk in chunks:
        model = language_model(chunk)
        for layer in model.decoder.layers:
            layer.register_forward_hook(waiting(PACED_LAYER))
        if model.post_process:
            model.output_layer.register_forward_hook(waiting(PACED_OUTPUT))


def name(number: int, split: Split) -> str:
    return f"round{number}-{'-'.join(map(str, split))}"


def real(repeats: int, out: Path, *, paced: bool) -> tuple[list[Outcome], list[str]]:
    """Outcomes of runs of megatron-core, and why a capture has none."""
    env = {"KINETO_LOG_LEVEL": "6", "PYTHONWARNINGS": "ignore"}
    arguments = (PACED if paced else REAL, (*CAPTURED, *SUGGESTED), out, repeats, paced)
    run_ranks(run_rank, 2, *arguments, timeout=TIME_LIMIT, env=env, on_line=_only_first)
    outcomes, missed = [], []
    for number in range(repeats):
        for split in CAPTURED:
            found = _what_if(out / name(number, split))
            best = _suggestion(found)
            label = f"round {number + 1}, {'+'.join(map(str, split))}"
            if best is None or best.layout is None:
                missed.append(f"{label}: {'; '.join(found.warnings) or found.advice}")
                continue
            suggested = layers_per_stage(parse_layout(best.layout, 2), 2)
            if suggested not in SUGGESTED:
                missed.append(f"{label}: {best.layout} was suggested and not run")
                continue
            outcomes.append(_outcome(label, found, best, _what_if(out / name(number, suggested))))
    return outcomes, missed


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
        suggested = layers_per_stage(parse_layout(best.layout, 4), 4)
        measured = _of_scenario(replace(scenario, layers=suggested, seed=1))
        yield _outcome("+".join(map(str, layers)), found, best, measured)
        count -= 1


def _of_scenario(scenario: Scenario) -> WhatIf:
    with tempfile.TemporaryDirectory() as directory:
        write(scenario, Path(directory))
        return _what_if(Path(directory))


def _what_if(directory: Path) -> WhatIf:
    return next(t.what_if for t in analyze(directory).targets if t.measured.target == "train_actor")


def _suggestion(found: WhatIf) -> Prediction | None:
    """The suggested layout; where the machine is too noisy for a suggestion, the one with the shortest step."""
    return found.best or next((each for each in found.candidates if each.kind == "layout"), None)


def _outcome(label: str, found: WhatIf, best: Prediction, after: WhatIf) -> Outcome:
    if found.replay_error is None or found.measured_ms is None or after.measured_ms is None or best.layout is None:
        raise RuntimeError(f"{label}: nothing was measured: {found.warnings + after.warnings}")
    return Outcome(
        captured=label,
        suggested=best.layout,
        gains=found.best is not None,
        replay_error=found.replay_error.mean,
        captured_ms=found.measured_ms,
        predicted_ms=best.step_ms,
        measured_ms=after.measured_ms,
        uncertainty=best.uncertainty_ms / after.measured_ms,
        error=best.step_ms / after.measured_ms - 1.0,
    )


def _only_first(rank: int, line: str) -> None:
    if rank == 0 and line.startswith("round "):
        print(f"  {line.rstrip()} (load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)", flush=True)


def _show(title: str, outcomes: Sequence[Outcome]) -> None:
    print(title)
    for each in outcomes:
        print(
            f"  {each.captured:18} {each.captured_ms:7.0f} ms, replay {each.replay_error:+6.1%} -> {each.suggested:22} "
            f"predicted {each.predicted_ms:6.0f} ± {each.uncertainty:4.0%}, measured {each.measured_ms:6.0f}: "
            f"{each.error:+6.1%}{'' if each.gains else ' (not suggested: within the uncertainty)'}"
        )


def _median(outcomes: Sequence[Outcome], *, all_of_them: bool = False) -> float | None:
    errors = [abs(each.error) for each in outcomes if each.gains or all_of_them]
    return statistics.median(errors) if errors else None


def _error_of_medians(outcomes: Sequence[Outcome]) -> float | None:
    """Median prediction against median measurement of every captured layout, the larger error of the two: what is left
    when the machine's speed between one capture and the next is averaged out."""
    errors = []
    for split in CAPTURED:
        own = [each for each in outcomes if each.captured.endswith("+".join(map(str, split)))]
        # Rounds may suggest different layouts: the most frequent one counts.
        layouts = [each.suggested for each in own]
        same = [each for each in own if each.suggested == max(layouts, key=layouts.count)]
        if same:
            predicted, measured = (
                statistics.median(getattr(o, n) for o in same) for n in ("predicted_ms", "measured_ms")
            )
            errors.append(abs(predicted / measured - 1.0))
    return max(errors, default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="rounds of real runs (default: 5)")
    parser.add_argument("--synthesised", type=int, default=20, help="synthesised pipelines (default: 20)")
    parser.add_argument("--out", type=Path, default=None, help="keep the traces there")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch)
        outcomes, missed = real(options.repeats, out / "real", paced=False)
        paced, missed_paced = real(options.repeats, out / "paced", paced=True)
    synthetic = list(synthesised(options.synthesised))
    _show("real, PP=2:", outcomes)
    _show("paced, PP=2:", paced)
    for reason in (*missed, *missed_paced):
        print(f"  no prediction: {reason}")
    _show("synthesised, PP=4:", synthetic)
    inside = [abs(each.error) <= each.uncertainty for each in outcomes]
    result = {
        "benchmark": "whatif",
        "median_error": _median(outcomes),
        "median_error_all": _median(outcomes, all_of_them=True),
        "error_of_medians": _error_of_medians(outcomes),
        "median_error_paced": _median(paced),
        "median_error_synthesised": _median(synthetic),
        "within_uncertainty": statistics.fmean(inside) if inside else None,
        "repeats": options.repeats,
        "no_prediction": len(missed) + len(missed_paced),
        "load": load,
        "real": [asdict(each) for each in outcomes],
        "paced": [asdict(each) for each in paced],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

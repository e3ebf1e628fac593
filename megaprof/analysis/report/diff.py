"""Two captures side by side, as data: what `compare` finds, and what the terminal, the page and JSON show."""

from __future__ import annotations

from dataclasses import dataclass

from megaprof.analysis.diagnosis.stages import Basis
from megaprof.analysis.notes import Note
from megaprof.analysis.samples import Interval
from megaprof.parallel.topology import ParallelSizes

QUANTITIES = ("forward_ms", "backward_ms", "compute_ms", "bubble_ms")


@dataclass(frozen=True)
class Difference:
    """One quantity before and after; None if a capture does not have it."""

    before: float | None
    """Milliseconds per step in the first capture, mean."""
    after: float | None
    """Milliseconds per step in the second capture, mean."""
    change: float | None
    """``after`` / ``before`` - 1. None if a value is missing, or if the captures are of different models."""
    beyond_spread: bool | None
    """True if it changed by more than it usually varies; None if there are too few samples, or no ``change``."""
    low: float | None = None
    """Lower end of the 90 % interval of ``change``. None if there are too few samples, or no ``change``."""
    high: float | None = None
    """Upper end of that interval."""


@dataclass(frozen=True)
class StageDiff:
    """One stage of both captures, or of one of them."""

    pp: int
    """Pipeline rank."""
    layers_before: str | None
    """Layers in the first capture, in words (``emb+6``); None if only the second capture has the stage."""
    layers_after: str | None
    """Layers in the second capture, in words; None if only the first capture has the stage."""
    changes: dict[str, Difference]
    """Differences by quantity: `QUANTITIES`."""


@dataclass(frozen=True)
class Kept:
    """A layout that the first capture predicted, and what the second one measured."""

    what: str
    """The layout in words."""
    layout: str
    """The layout as in Megatron's ``--pipeline-model-parallel-layout``."""
    predicted_ms: float
    """Predicted step in milliseconds, on the machine as it was in the first capture."""
    expected_ms: Interval | None
    """Predicted step in milliseconds, on the machine as it was in the second capture: with layers as fast and
    disturbances as large as they were there. None if a capture does not show the cost of a layer, or if
    the disturbances of the first one leave nothing of the prediction."""
    measured_ms: float
    """Measured step of the second capture in milliseconds."""
    before_ms: float
    """Measured step of the first capture in milliseconds."""
    predicted: Interval
    """Predicted speedup."""
    measured: float
    """Measured speedup: ``before_ms`` / ``measured_ms``, whatever caused it."""
    error: float | None
    """Error of the prediction: ``expected_ms`` / ``measured_ms`` - 1. None if ``expected_ms`` is None."""
    inside: bool | None
    """True if ``measured_ms`` is in the interval of ``expected_ms``. None if ``expected_ms`` is None, if the predicted
    interval includes both slower and faster, or if half of the interval is at least as large as the predicted change of
    the step."""


@dataclass(frozen=True)
class TargetSide:
    """Notes on a target in one capture, apart from its times."""

    verdict: str
    """The verdict in a few words: what costs the most."""
    schedule: str | None
    """Megatron's schedule; None if the traces do not say."""
    microbatches: int | None
    """Microbatches per step; None if steps differ or the traces do not say."""
    layers: dict[str, int] | None
    """Number of the model's layers by kind (``dense``, ``moe``, ...); None if not all stages say."""
    sizes: ParallelSizes
    """Parallel sizes of the job."""
    step_time_basis: Basis
    """How a step is measured."""
    withheld: Note | None
    """Why no cause is named; None if causes are looked for."""
    warnings: tuple[Note, ...]
    """Warnings of the capture's report."""


def same_layers(before: dict[str, int] | None, after: dict[str, int] | None) -> bool:
    """Returns whether two models have the same layers. True if a capture does not say which it has."""
    return before is None or after is None or before == after


@dataclass(frozen=True)
class TargetDiff:
    """One target and role that both captures have."""

    target: str
    """``train_actor``, ..."""
    role: str | None
    """``actor``, ...; None without roles."""
    before: TargetSide
    """Notes on the first capture."""
    after: TargetSide
    """Notes on the second capture."""
    step_time: Difference
    """Duration of a step."""
    stages: tuple[StageDiff, ...]
    """Stages, by pipeline rank."""
    layer: Difference | None
    """Forward and backward of a microbatch in a decoder layer, in the quicker passes (their lower quartile). A layout
    does not change it; only another machine, load or setting does. None if a capture does not show it, or if the
    captures are of different models."""
    prediction: Kept | None
    """Prediction of the first capture for the layout of the second one; None if it made none."""
    causes: dict[str, Difference]
    """What the causes of each kind cost, in milliseconds of a step; 0 in a capture that names none of the kind. There,
    ``beyond_spread`` says that the intervals of both prices do not overlap. Empty unless both captures look for
    causes."""

    @property
    def comparable(self) -> bool:
        """Returns whether the steps of both captures do the same work, and are measured alike, as far as they say."""
        before, after = self.before, self.after
        counted = None in (before.microbatches, after.microbatches) or before.microbatches == after.microbatches
        return self.same_model and counted and before.step_time_basis == after.step_time_basis

    def slower_by(self, bound: float) -> bool | None:
        """Returns whether a step is surely slower by more than the fraction ``bound`` (True), or surely not (False);
        None if that is not certain."""
        low, high = self.step_time.low, self.step_time.high
        if low is None or high is None or not self.comparable or low <= bound < high:
            return None
        return low > bound

    @property
    def same_model(self) -> bool:
        """Returns whether the models have the same layers, as far as the captures say."""
        return same_layers(self.before.layers, self.after.layers)

    @property
    def quantities(self) -> tuple[str, ...]:
        """Returns the `QUANTITIES` that at least one stage has: a forward-only target has no backward."""
        had = {
            name
            for stage in self.stages
            for name, difference in stage.changes.items()
            if difference.before or difference.after
        }
        return tuple(name for name in QUANTITIES if name in had)


@dataclass(frozen=True)
class Side:
    """Notes on one capture as a whole."""

    unpaired: tuple[tuple[str, str | None], ...]
    """Targets and roles that only this capture has; they are not compared."""
    of_several: str | None
    """A sentence that says that its directory holds other runs, and how to see them; None if there is one run."""
    warnings: tuple[Note, ...]
    """Warnings about single files."""


@dataclass(frozen=True)
class Diff:
    """Two captures, compared target by target."""

    before: Side
    """Notes on the first capture."""
    after: Side
    """Notes on the second capture."""
    targets: tuple[TargetDiff, ...]
    """Targets that both captures have."""

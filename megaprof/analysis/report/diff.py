"""Two captures side by side, as data: what `compare` finds, and what the terminal, the page and JSON show."""

from __future__ import annotations

from dataclasses import dataclass

from megaprof.analysis.diagnosis.stages import Basis
from megaprof.analysis.notes import Note
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
    """``after`` / ``before`` - 1."""
    beyond_spread: bool | None
    """True if it changed by more than it usually varies; None if there are too few samples."""


@dataclass(frozen=True)
class StageDiff:
    """One stage of both captures, or of one of them."""

    pp: int
    """Pipeline rank."""
    layers_before: str | None
    """Layers in the first capture, in words (``emb+6``); None if only the second capture has the stage."""
    layers_after: str | None
    """Layers in the second capture, likewise."""
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
    expected_ms: float | None
    """The same on the machine as it was in the second capture: with layers as fast and disturbances as large as there.
    None if a capture does not show the cost of an undisturbed layer."""
    uncertain_ms: float | None
    """Uncertainty of that: half of its 90 % interval."""
    measured_ms: float
    """Measured step in milliseconds, like predictions without what closing other windows added."""
    before_ms: float
    """The same for the first capture."""
    predicted: float
    """Predicted speedup."""
    low: float
    """Lower end of its 90 % interval."""
    high: float
    """Upper end of its 90 % interval."""
    measured: float
    """Step before / step after, whatever changed it."""
    error: float | None
    """``expected_ms`` / ``measured_ms`` - 1."""
    inside: bool | None
    """True if ``measured_ms`` is within ``uncertain_ms`` of ``expected_ms``. None if the predicted interval reaches
    from slower to faster, or if the change of the machine is less certain than the prediction."""


@dataclass(frozen=True)
class TargetSide:
    """Notes on a target in one capture, besides its times."""

    verdict: str
    """What costs the most, in a few words."""
    schedule: str | None
    """Megatron's schedule; None if the traces do not say."""
    microbatches: int | None
    """Microbatches per step; None if steps differ or the traces do not say."""
    sizes: ParallelSizes
    """Parallel sizes of the job."""
    step_time_basis: Basis
    """How a step is measured."""
    basis: str | None
    """Which steps the causes and predictions are about, if not those of the tables; a clause."""
    withheld: Note | None
    """Why no cause is named; None if causes are looked for."""
    warnings: tuple[Note, ...]
    """Warnings of the capture's report."""


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
    """Undisturbed forward and backward of a microbatch in a decoder layer. No layout changes it, only another machine,
    load or setting. None if a capture does not show it."""
    prediction: Kept | None
    """What the first capture predicted for the second one's layout; None if it predicted nothing."""

    @property
    def quantities(self) -> tuple[str, ...]:
        """Those of `QUANTITIES` that a stage has: a forward-only target has no backward."""
        had = {name for stage in self.stages for name, each in stage.changes.items() if each.before or each.after}
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

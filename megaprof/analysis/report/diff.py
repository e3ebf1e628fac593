"""Two captures side by side, as data: what `compare` finds, and what the terminal, the page and JSON show."""

from __future__ import annotations

from dataclasses import dataclass

from megaprof.analysis.diagnosis.stages import Basis
from megaprof.analysis.notes import Note
from megaprof.parallel.topology import ParallelSizes

QUANTITIES = ("forward_ms", "backward_ms", "compute_ms", "bubble_ms")


@dataclass(frozen=True)
class Difference:
    """One quantity before and after; None where a capture does not have it."""

    before: float | None
    """Milliseconds per step, the mean."""
    after: float | None
    """The same in the second capture."""
    change: float | None
    """``after`` over ``before``, minus 1."""
    beyond_spread: bool | None
    """Whether it changed by more than it varies anyway; None where too few samples tell."""


@dataclass(frozen=True)
class StageDiff:
    """One stage of both captures, or of one of them."""

    pp: int
    """Its pipeline rank."""
    layers_before: str | None
    """Its layers in words (``emb+6``); None for a stage that is only in the second capture."""
    layers_after: str | None
    """The same in the second capture."""
    changes: dict[str, Difference]
    """By quantity: `QUANTITIES`."""


@dataclass(frozen=True)
class Kept:
    """A layout that was predicted from the first capture, and what the second one measured."""

    what: str
    """The layout in words."""
    layout: str
    """As Megatron's ``--pipeline-model-parallel-layout`` writes it."""
    predicted_ms: float
    """Milliseconds of the step that was predicted, on the machine as the first capture found it."""
    expected_ms: float | None
    """The same on the machine as the second capture found it: with layers as quick, and as much lost to disturbances,
    as there. None where a capture does not tell what an undisturbed layer takes."""
    uncertain_ms: float | None
    """By how much that may be off: half of its 90 % interval."""
    measured_ms: float
    """Milliseconds of the step that it took, without what closing other windows added to it, as predictions are."""
    before_ms: float
    """The same of the first capture."""
    predicted: float
    """The predicted speedup."""
    low: float
    """The lower end of its 90 % interval."""
    high: float
    """The upper end."""
    measured: float
    """The step before over the step after, whatever changed it."""
    error: float | None
    """``expected_ms`` over ``measured_ms``, minus 1."""
    inside: bool | None
    """Whether ``measured_ms`` is within ``uncertain_ms`` of ``expected_ms``; None where nothing was predicted, because
    the interval spans quicker and slower, and where what the machine changed is less certain than what was predicted.
    """


@dataclass(frozen=True)
class TargetSide:
    """What must be known of a target in one capture, besides its times."""

    verdict: str
    """What costs most, in a few words."""
    schedule: str | None
    """Megatron's schedule; None where the traces do not say."""
    microbatches: int | None
    """Microbatches per step; None where steps differ or the traces do not say."""
    sizes: ParallelSizes
    """The parallel sizes of its job."""
    step_time_basis: Basis
    """From when to when a step is measured."""
    basis: str | None
    """Of which steps the causes and predictions are, a clause, where these are others than those of the tables."""
    withheld: Note | None
    """Why no cause of lost time is named; None where causes are looked for."""
    warnings: tuple[Note, ...]
    """What the capture's report warns of."""


@dataclass(frozen=True)
class TargetDiff:
    """One target and role that both captures have."""

    target: str
    """``train_actor``, ..."""
    role: str | None
    """``actor``, ...; None without roles."""
    before: TargetSide
    """What must be known of the first capture."""
    after: TargetSide
    """The same of the second."""
    step_time: Difference
    """The time of a step."""
    stages: tuple[StageDiff, ...]
    """By pipeline rank."""
    layer: Difference | None
    """What a microbatch takes in a decoder layer that nothing disturbs, forward and backward, whatever the layout: only
    another machine, load or setting changes it. None where a capture does not tell."""
    prediction: Kept | None
    """What the first capture predicted of the second one's layout; None where it did not."""

    @property
    def quantities(self) -> tuple[str, ...]:
        """Those of `QUANTITIES` that a stage has: a forward-only target has no backward."""
        had = {name for stage in self.stages for name, each in stage.changes.items() if each.before or each.after}
        return tuple(name for name in QUANTITIES if name in had)


@dataclass(frozen=True)
class Side:
    """What must be known of one capture as a whole."""

    unpaired: tuple[tuple[str, str | None], ...]
    """The targets, with their roles, that the other capture does not have: they are not compared."""
    of_several: str | None
    """That its directory holds other runs, and how to see one, a sentence; None where there is one run."""
    warnings: tuple[Note, ...]
    """About single files."""


@dataclass(frozen=True)
class Diff:
    """Two captures, target by target."""

    before: Side
    """What must be known of the first capture."""
    after: Side
    """The same of the second."""
    targets: tuple[TargetDiff, ...]
    """Those that both captures have."""

"""A rehearsal in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from megaprof.analysis.report.text import what_if, words
from megaprof.rehearse.rehearsal import Rehearsal
from megaprof.tune.words import milliseconds

_GIB = 1 << 30


def sentences(rehearsal: Rehearsal) -> Iterator[str]:
    """Yields how long a step is predicted to take, whether it fits, what would be better, and what that rests on."""
    step, ranks = rehearsal.step_ms, words.counted(rehearsal.sizes.world, "rank")
    measured = min(rehearsal.measured_ms / step.value, 1.0)
    yield (
        f"A step on {ranks} ({rehearsal.sizes}) should take {milliseconds(step)} ms. {words.percent(measured)} of it "
        f"was measured here, and {words.percent(1 - measured)} computed from bytes and links."
    )
    allocated, allowed = rehearsal.what_if.allocated, rehearsal.what_if.allowed
    best = None if rehearsal.best is None else what_if.name_of(rehearsal.best, rehearsal.what_if)
    if allocated is None:
        yield "Whether it fits is not known: no memory of a device was recorded."
    elif allowed is not None and rehearsal.too_large:
        needed = (f"{allocated[stage] / _GIB:.3g} of {allowed[stage] / _GIB:.3g} GiB" for stage in rehearsal.too_large)
        on = ", ".join(f"stage {stage}: {size}" for stage, size in zip(rehearsal.too_large, needed, strict=True))
        yield f"It does not fit on {on}. " + (f"With {best} it does." if best else "No other layout is known to fit.")
    else:
        yield f"It fits: the largest stage allocates {max(allocated) / _GIB:.3g} GiB."
    yield rehearsal.limited_by
    if best is not None and rehearsal.best is not None:
        yield f"With {best}, a step should take {milliseconds(rehearsal.best.step_ms)} ms."
    yield f"This assumes that {'; '.join(rehearsal.assumes)}." if rehearsal.assumes else "Nothing is exchanged."
    yield "The losses of a rehearsal mean nothing: its ranks had no others."

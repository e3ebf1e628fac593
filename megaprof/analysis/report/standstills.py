"""What a report says of steps in which the job stood still, or in the middle of which it ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megaprof.analysis.stages.words import ago, counted, spans
from megaprof.formats.job.standstill import Standing, Standstill

#: Steps, and ranks of one that were waited for, that each have words of their own.
_MOST = 3


def told(found: Sequence[Standstill]) -> Iterator[str]:
    """A sentence or two for each step, the longest first, and one for all others."""
    ordered = sorted(found, key=lambda each: -each.seconds)
    yield from map(_step, ordered[:_MOST])
    if more := ordered[_MOST:]:
        yield f"It stood still in {counted(len(more), 'more step')}: {spans(sorted(each.step for each in more), 8)}."


def _step(found: Standstill) -> str:
    lasts, seconds = found.outcome == "lasts", ago(found.seconds)
    text = {
        "went_on": f"The job stood still in step {found.step} for {seconds}, and then went on",
        "last": f"The job stood still in step {found.step} for {seconds}, and did no other step after it",
        "unfinished": f"The job ended in the middle of step {found.step}"
        + (f", in which it had stood still for {seconds}" if found.seconds else ""),
        "lasts": f"The job stands still in step {found.step}, for {seconds} by now",
    }[found.outcome]
    if found.waited_for:
        shown = [_rank(each, "stands" if lasts else "stood") for each in found.waited_for[:_MOST]]
        more = len(found.waited_for) - len(shown)
        text += ": " + "; ".join([*shown, *([f"and {more} more"] if more else [])])
        if found.waiting:
            wait = ("waits" if found.waiting == 1 else "wait") if lasts else "waited"
            for_whom = "it" if len(found.waited_for) == 1 else "them"
            text += f"; {counted(found.waiting, 'rank')} {wait} for {for_whom}"
    return f"{text}. This step counts for no time."


def _rank(rank: Standing, verb: str) -> str:
    place = f"rank {rank.rank} (stage {rank.stage})"
    if rank.phase is None:
        return f"{place} {verb} outside of the schedule's ranges"
    microbatch = "" if rank.microbatch is None else f" of microbatch {rank.microbatch}"
    chunk = f" (chunk {rank.chunk})" if rank.chunk else ""
    return f"{place} {verb} in {rank.phase}{microbatch}{chunk}"

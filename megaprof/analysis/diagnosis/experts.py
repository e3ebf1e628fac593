"""Whether a rank or a stage is slow because its experts got more tokens than others'.

What passes take for experts is at most in proportion to their tokens: a rank with 1.1 times the tokens of its peers is
for that reason at most 1.1 times as slow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megaprof.analysis.table.table import Table


@dataclass(frozen=True)
class ExpertLoad:
    """The tokens of some experts against others'."""

    tokens: float
    """Those that the experts of the slow rank got in a captured step; of a stage, of its rank that got most."""
    usual: float
    """Those of its peers on average; of other stages likewise."""
    ranks: int | None = None
    """How many have them, the slow one included; None of stages, each of which has its own."""

    def explains(self, factor: float) -> float:
        """At most so much of being ``factor`` times as slow."""
        return float(np.clip((self.tokens / max(self.usual, 1.0) - 1.0) / max(factor - 1.0, 1e-9), 0.0, 1.0))

    @property
    def evened(self) -> float:
        """What even experts gain, as a part of what the rank would gain if it were as quick as its peers are now: these
        get what it loses."""
        return 1.0 if self.ranks is None else 1.0 - 1.0 / self.ranks


def load_of_rank(table: Table, ranks: tuple[int, ...]) -> ExpertLoad | None:
    """Of one rank against its peers, or of ranks that wait for each other against those of other replicas; None where
    tokens were not counted, or there are no others."""
    if table.experts is None:
        return None
    named = table.ranks[..., : table.experts.shape[2]]
    d, s, p = (int(each[0]) for each in np.nonzero(np.isin(named, ranks)))
    if len(ranks) == 1 and table.experts.shape[2] > 1:
        own, others = table.experts[d, s, p], np.delete(table.experts[d, s], p)
    else:
        most = table.experts.max(axis=2)[:, s]
        own, others = most[d], np.delete(most, d)
    return ExpertLoad(float(own), float(others.mean()), 1 + len(others)) if len(others) else None


def load_of_stage(table: Table, stage: int) -> ExpertLoad | None:
    """Of the rank of a stage that got most, for all others wait for it, against that of other stages."""
    if table.experts is None or table.experts.shape[1] == 1:
        return None
    most = table.experts.max(axis=2).mean(axis=0)
    return ExpertLoad(float(most[stage]), float(np.median(np.delete(most, stage))))

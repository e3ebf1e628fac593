"""Finds out if a rank or a stage is slow because its experts got more tokens than others'.

The time of experts is at most proportional to their tokens: a rank with 1.1 times the tokens of its peers is at most
1.1 times as slow for that reason.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megaprof.analysis.table.table import Table


@dataclass(frozen=True)
class ExpertLoad:
    """The tokens of some experts compared with those of others."""

    tokens: float
    """Tokens that the experts of the slow rank got in a captured step; for a stage, those of its busiest rank."""
    usual: float
    """Average over its peers; for a stage, the median of the other stages."""
    ranks: int | None = None
    """Number of ranks that share the tokens, with the slow one; None for stages, each of which has its own tokens."""

    def explains(self, factor: float) -> float:
        """Returns how much of being ``factor`` times as slow the tokens can explain at most."""
        return float(np.clip((self.tokens / max(self.usual, 1.0) - 1.0) / max(factor - 1.0, 1e-9), 0.0, 1.0))

    @property
    def evened(self) -> float:
        """The gain from evening out the experts, as a fraction of the gain if the rank became as quick as its peers are
        now. It is less than 1 because the peers get the tokens that the rank loses."""
        return 1.0 if self.ranks is None else 1.0 - 1.0 / self.ranks


def load_of_rank(table: Table, ranks: tuple[int, ...]) -> ExpertLoad | None:
    """Returns the load of one rank compared with its peers, or of ranks that wait for each other compared with those of
    other replicas. None if tokens were not counted, or if there are no others."""
    if table.experts is None:
        return None
    named = table.ranks[..., : table.experts.shape[2]]
    d, s, p = (int(indices[0]) for indices in np.nonzero(np.isin(named, ranks)))
    if len(ranks) == 1 and table.experts.shape[2] > 1:
        tokens, others = table.experts[d, s, p], np.delete(table.experts[d, s], p)
    else:
        most = table.experts.max(axis=2)[:, s]
        tokens, others = most[d], np.delete(most, d)
    return ExpertLoad(float(tokens), float(others.mean()), 1 + len(others)) if len(others) else None


def load_of_stage(table: Table, stage: int) -> ExpertLoad | None:
    """Returns the load of the busiest rank of a stage, which the others wait for, compared with other stages."""
    if table.experts is None or table.experts.shape[1] == 1:
        return None
    most = table.experts.max(axis=2).mean(axis=0)
    return ExpertLoad(float(most[stage]), float(np.median(np.delete(most, stage))))

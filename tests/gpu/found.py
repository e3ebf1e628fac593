"""What a part found: figures, and checks that say what was expected."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


def difference(those: Sequence[float], these: Sequence[float]) -> list[float]:
    """The median of the differences of neighbours, and its standard error as the median deviation has it."""
    pairs = [one - other for one, other in zip(those, these, strict=True)]
    middle = statistics.median(pairs)
    spread = 1.4826 * statistics.median(abs(each - middle) for each in pairs)
    return [middle, 1.2533 * spread / len(pairs) ** 0.5]


@dataclass(frozen=True)
class Check:
    """One expectation, and what was found."""

    what: str
    """The sentence that holds, or does not."""
    expected: Any
    """In words or numbers."""
    found: Any
    """What was there: a number, a word, a list."""
    held: bool | None
    """None: a rehearsal without a GPU cannot tell."""


@dataclass
class Found:
    """One part's result."""

    figures: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    skipped: str | None = None
    """Why this machine cannot run the part."""

    def expect(self, what: str, found: Any, expected: Any, held: bool | None = None) -> None:
        """Note that ``found`` should be ``expected``; ``held`` where that is not a comparison."""
        self.checks.append(Check(what, expected, found, found == expected if held is None else held))

    def on_a_gpu(self, cpu: bool, what: str, found: Any, expected: Any, held: bool | None = None) -> None:
        """The same, of something that a rehearsal cannot tell."""
        if cpu:
            self.checks.append(Check(what, expected, found, None))
        else:
            self.expect(what, found, expected, held)

    def within(self, cpu: bool, what: str, found: float | None, expected: float | None, share: float) -> None:
        """Note that ``found`` should be within ``share`` of ``expected``, on a GPU."""
        held = found is not None and expected is not None and abs(found - expected) <= share * abs(expected)
        shown = "a number" if expected is None else f"{expected:.4g} within {100 * share:g} %"
        self.on_a_gpu(cpu, what, found, shown, held)

    def nothing(self, cpu: bool, what: str, cost: list[float], of: float, share: float) -> None:
        """Note that ``cost``, as `difference` has it, should be less than ``share`` of ``of``, give or take its
        error."""
        held = abs(cost[0]) <= share * of + 2 * cost[1]
        self.on_a_gpu(cpu, what, f"{cost[0]:.3g} give or take {cost[1]:.2g}", f"0 within {share * of:.3g}", held)

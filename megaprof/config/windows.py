"""Which steps are captured: step lists and schedules, per target. Plain data, no clock, no communication."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

#: One window = one grad-accumulation step: every forward and backward of its microbatches, without the optimizer.
TRAIN_ACTOR = "train_actor"
#: One window = one forward-only pass for log-probs or values.
TRAIN_LOG_PROBS = "train_log_probs"
#: One window = one evaluation pass. Forward-only as well, and never counted as a log-prob pass.
EVALUATE = "evaluate"
#: One window = from the start of one grad-accumulation step to the start of the next: optimizer, data loading, log-prob
#: passes and evaluation between them included.
TRAIN_OVERALL = "train_overall"

#: One window = one run of annotated work of a role, with ``--profile-discrete``. Not a target to ask for.
ANNOTATED = "annotated"

TARGETS = (TRAIN_ACTOR, TRAIN_LOG_PROBS, EVALUATE, TRAIN_OVERALL)


class Phase(Enum):
    """What a step is for: nothing, warming the profiler up (recorded and thrown away), or a window."""

    OFF = "off"
    WARMUP = "warmup"
    ACTIVE = "active"


@dataclass(frozen=True)
class StepList:
    """Captures the steps whose number, in the host's own counting, lies in one of ``ranges``."""

    ranges: tuple[range, ...]

    def phase(self, step: int, index: int) -> Phase:
        """``step`` is the host's iteration number; ``index`` (calls since install) does not matter here."""
        return Phase.ACTIVE if any(step in steps for steps in self.ranges) else Phase.OFF


@dataclass(frozen=True)
class Schedule:
    """The cycle of ``torch.profiler.schedule``, over the calls of one target since hooks were installed."""

    skip_first: int
    wait: int
    warmup: int
    active: int
    repeat: int  # 0: the whole run

    def phase(self, step: int, index: int) -> Phase:
        """``index`` counts this target's calls in this process from 0; ``step`` does not matter here."""
        position = index - self.skip_first
        cycle = self.wait + self.warmup + self.active
        if position < 0 or (self.repeat and position >= cycle * self.repeat):
            return Phase.OFF
        position %= cycle
        if position < self.wait:
            return Phase.OFF
        return Phase.WARMUP if position < self.wait + self.warmup else Phase.ACTIVE


Plan = StepList | Schedule
NONE = "none"


def parse_steps(text: str, option: str) -> dict[str | None, StepList]:
    """Read ``10``, ``1,2,5``, ``20:30``, ``20:30:5`` (end excluded), ``none``, or the same per target.

    Per target: ``train_actor=10:12;train_log_probs=0``. The key ``None`` holds the steps of all targets that are not
    named. Raises ValueError that names ``option``, the value and what would be valid.
    """
    lists: dict[str | None, StepList] = {}
    for part in text.split(";"):
        target, separator, steps = part.rpartition("=")
        key = target.strip() if separator else None
        if key is not None and key not in TARGETS:
            raise ValueError(f"{option}: unknown target {key!r} in {text!r}; known: {', '.join(TARGETS)}")
        if key in lists:
            raise ValueError(f"{option}: {key or 'steps without a target'} given twice in {text!r}")
        lists[key] = parse_step_list(steps, text, option)
    return lists


def parse_step_list(steps: str, text: str, option: str) -> StepList:
    """Read the steps of one target or role, a part of ``text``. ``[1, 2]`` is ``1,2``; ``[]``, ``null``: ``none``."""
    inner = steps.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1].strip() or NONE
    if inner.lower() in (NONE, "null"):
        return StepList(())
    return StepList(tuple(_parse_range(item, text, option) for item in inner.split(",")))


def _parse_range(item: str, text: str, option: str) -> range:
    numbers = [part.strip() for part in item.split(":")]
    if not 1 <= len(numbers) <= 3 or not all(n.isascii() and n.isdigit() for n in numbers):
        raise ValueError(
            f"{option}: {item.strip()!r} in {text!r} is not a step; valid: 10, 1,2,5, 20:30, 20:30:5 (from 0 on), none"
        )
    first, *rest = map(int, numbers)
    if not rest:
        return range(first, first + 1)
    last, stride = rest[0], rest[1] if len(rest) > 1 else 1
    if first >= last:
        raise ValueError(f"{option}: start {first} must be less than end {last} in {text!r}")
    if stride < 1:
        raise ValueError(f"{option}: stride {stride} must be at least 1 in {text!r}")
    return range(first, last, stride)

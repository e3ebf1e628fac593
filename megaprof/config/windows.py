"""Which steps are captured: step lists and schedules, per target and role. Plain data, no clock, no communication."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain, islice

#: One window = one grad-accumulation step: every forward and backward of its microbatches, without the optimizer.
TRAIN_ACTOR = "train_actor"
#: One window = one forward-only pass for log-probs or values.
TRAIN_LOG_PROBS = "train_log_probs"
#: One window = one evaluation pass. Forward-only as well, and never counted as a log-prob pass.
EVALUATE = "evaluate"
#: One window = one step of the host: from the first call with its number to the first call with the next number. All
#: mini-batches, the optimizer, data loading, log-prob passes and evaluation are in it. If the host numbers nothing, it
#: lasts from one grad-accumulation step of a role to the next one of that role.
TRAIN_OVERALL = "train_overall"

#: One window = one run of annotated work of a role, with ``--profile-discrete``. It has steps, but it is no target.
ANNOTATED = "annotated"

TARGETS = (TRAIN_ACTOR, TRAIN_LOG_PROBS, EVALUATE, TRAIN_OVERALL)


@dataclass(frozen=True)
class StepList:
    """Captures the steps whose number, as the host counts them, lies in one of ``ranges``."""

    ranges: tuple[range, ...]
    """The step numbers. Ranges may overlap; without any, no step is captured."""

    def captures(self, step: int, index: int) -> bool:
        """Returns whether the step with the host's number ``step`` is captured; ``index`` does not matter here."""
        return any(step in steps for steps in self.ranges)

    def goes_on(self, step: int, index: int) -> bool:
        """Returns whether any step after ``step`` is captured."""
        return any(step < steps[-1] for steps in self.ranges)

    @property
    def windows(self) -> int:
        """How many windows the whole run has."""
        return len(set[int]().union(*self.ranges))

    def left(self, captured: Collection[int], limit: int) -> list[int]:
        """Returns the first steps that are not among ``captured``, in ascending order, at most ``limit`` of them."""
        missing = (islice((step for step in steps if step not in captured), limit) for steps in self.ranges)
        return sorted(set(chain.from_iterable(missing)))[:limit]


@dataclass(frozen=True)
class Schedule:
    """The cycle of ``torch.profiler.schedule``, over the calls of one target since hooks were installed."""

    skip_first: int = 3
    wait: int = 0
    warmup: int = 0
    """Calls after the idle ones, which are not captured either. The profiler is prepared after the last one."""
    active: int = 1
    repeat: int = 1
    """Number of cycles; 0 for the whole run."""

    @property
    def cycle(self) -> int:
        """Calls in one cycle."""
        return self.wait + self.warmup + self.active

    def captures(self, step: int, index: int) -> bool:
        """Returns whether call ``index`` of the target, from 0 on, is captured; ``step`` does not matter here."""
        position = index - self.skip_first
        if position < 0 or (self.repeat and position >= self.cycle * self.repeat):
            return False
        return position % self.cycle >= self.wait + self.warmup

    def goes_on(self, step: int, index: int) -> bool:
        """Returns whether any call after ``index`` is captured."""
        return not self.repeat or index + 1 < self.skip_first + self.cycle * self.repeat

    @property
    def windows(self) -> int | None:
        """How many windows the whole run has; None if the cycles never end."""
        return None if self.repeat == 0 else self.repeat * self.active


def parse_schedule(text: str, option: str) -> Schedule:
    """Reads ``SKIP_FIRST:WAIT:WARMUP:ACTIVE:REPEAT``; parts that are left out at the end have their default. Raises
    ValueError that names ``option``, the value and what would be valid."""
    parts = [part.strip() for part in text.split(":")]
    numbers = [int(part) for part in parts if part.isascii() and part.isdigit()]
    if len(numbers) != len(parts) or len(numbers) > 5 or 0 in numbers[3:4]:
        raise ValueError(
            f"{option}: {text!r} is not SKIP_FIRST:WAIT:WARMUP:ACTIVE:REPEAT; valid: whole numbers, ACTIVE at least 1, "
            "as in 3:0:0:1:1; parts may be left out at the end"
        )
    return Schedule(*numbers)


Plan = StepList | Schedule
NONE = "none"


def parse_steps(text: str, option: str) -> dict[str | None, StepList]:
    """Reads ``10``, ``1,2,5``, ``20:30``, ``20:30:5`` (end excluded), ``none``, or the same per target, as in
    ``train_actor=10:12;train_log_probs=0``.

    The key ``None`` holds the steps of all targets that are not named. Raises ValueError that names ``option``, the
    value and what would be valid.
    """
    lists: dict[str | None, StepList] = {}
    for part in text.split(";"):
        target, separator, steps = part.rpartition("=")
        key = target.strip() if separator else None
        if key is not None and key not in (*TARGETS, ANNOTATED):
            valid_targets = ", ".join((*TARGETS, ANNOTATED))
            raise ValueError(f"{option}: unknown target {key!r} in {text!r}; known: {valid_targets}")
        if key in lists:
            raise ValueError(f"{option}: {key or 'steps without a target'} given twice in {text!r}")
        lists[key] = parse_step_list(steps, text, option)
    return lists


def parse_step_list(steps: str, text: str, option: str) -> StepList:
    """Reads the steps of one target or role, which are a part of ``text``. ``[1, 2]`` means ``1,2``; ``[]`` and
    ``null`` mean ``none``."""
    inner = steps.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1].strip() or NONE
    if inner.lower() in (NONE, "null"):
        return StepList(())
    return StepList(tuple(_parse_range(item, text, option) for item in inner.split(",")))


def _parse_range(item: str, text: str, option: str) -> range:
    numbers = [part.strip() for part in item.split(":")]
    if not 1 <= len(numbers) <= 3 or not all(number.isascii() and number.isdigit() for number in numbers):
        raise ValueError(
            f"{option}: {item.strip()!r} in {text!r} is not a step; valid: 10, 1,2,5, 20:30, 20:30:5 (from 0 on), none"
        )
    start, *bounds = map(int, numbers)
    if not bounds:
        return range(start, start + 1)
    stop, stride = bounds[0], bounds[1] if len(bounds) > 1 else 1
    if start >= stop:
        raise ValueError(f"{option}: start {start} must be less than end {stop} in {text!r}")
    if stride < 1:
        raise ValueError(f"{option}: stride {stride} must be at least 1 in {text!r}")
    return range(start, stop, stride)


def checked_role(name: object, option: str) -> str:
    """Returns ``name`` as the name of a role. Raises ValueError if it cannot be one."""
    if not isinstance(name, str) or not name.strip() or set(name) & set(";="):
        raise ValueError(
            f"{option}: {name!r} is not a role; valid: a non-empty name without ';' and '=', such as 'ref'"
        )
    return name.strip()


def parse_per_role(text: str, option: str) -> dict[str, str]:
    """Reads ``actor=0,1;ref=none`` as ``{"actor": "0,1", "ref": "none"}``. Raises ValueError naming ``option``."""
    values: dict[str, str] = {}
    for part in text.split(";"):
        name, equals, value = part.partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not name or not value:
            raise ValueError(f"{option}: {part.strip()!r} in {text!r} is not 'role=...'; valid: 'actor=0,1;ref=none'")
        if name in values:
            raise ValueError(f"{option}: role {name!r} given twice in {text!r}")
        values[name] = value
    return values

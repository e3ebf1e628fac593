"""The values of options: which steps are captured (step lists and schedules, per target and role), which tools exist,
and functions that read the value of a flag, a variable or a keyword: ``read(name, value)``.

Each reader takes the option as it was spelled, for its messages, and a value as text or as plain data, some of them
after what is valid, and raises ValueError naming option, value and what would be valid. No clock, no communication.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from megaprof.artifacts.places import is_remote

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
        longest, others = max(self.ranges, key=len, default=range(0)), set[int]()
        others.update(*(steps for steps in self.ranges if steps is not longest))
        return len(longest) + sum(step not in longest for step in others)

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
NO_STEPS = StepList(())
NONE = "none"
_RANGE = re.compile(r"(\d+)(?:\s*:\s*(\d+)(?:\s*:\s*(\d+))?)?", re.ASCII)


def parse_steps(text: str, option: str) -> dict[str | None, StepList]:
    """Reads ``10``, ``1,2,5``, ``20:30``, ``20:30:5`` (end excluded), ``none``, or the same per target, as in
    ``train_actor=10:12;train_log_probs=0``. ``[1, 2]`` means ``1,2``; ``[]`` and ``null`` mean ``none``.

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
        steps = steps.strip()
        if steps.startswith("[") and steps.endswith("]"):
            steps = steps[1:-1].strip() or NONE
        items = [] if steps.lower() in (NONE, "null") else steps.split(",")
        lists[key] = StepList(tuple(_parse_range(item, text, option) for item in items))
    return lists


def _parse_range(item: str, text: str, option: str) -> range:
    match = _RANGE.fullmatch(item.strip())
    if match is None:
        raise ValueError(
            f"{option}: {item.strip()!r} in {text!r} is not a step; valid: 10, 1,2,5, 20:30, 20:30:5 (from 0 on), none"
        )
    start = int(match[1])
    stop, stride = int(match[2] or start + 1), int(match[3] or 1)
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


_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def text(name: str, value: Any) -> str:
    """Reads a string or a path that is not empty, without the spaces around it."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value).strip():
        raise ValueError(f"{name}: {value!r} is not a non-empty string")
    return str(os.fspath(value)).strip()


def directory(name: str, value: Any) -> str:
    """Reads a directory as an absolute path, because the process may change its working directory. A remote directory
    stays as it is. No shell replaces the ``~`` of a configuration file or of ``--profile-dir=~/traces``.

    Raises ValueError for a relative path in a Ray worker, which was not started in the directory where the user typed
    it, or if the working directory was removed.
    """
    path = os.path.expanduser(text(name, value))
    if is_remote(path):
        return path
    worker = getattr(sys.modules.get("ray._private.worker"), "global_worker", None)
    try:
        if worker is None or worker.mode != 1 or os.path.isabs(path):  # ray.WORKER_MODE
            return os.path.abspath(path)
        where = "in a worker of Ray's, which has its own working directory"
    except OSError:
        where = "where the working directory no longer exists"
    raise ValueError(
        f"{name}: {path!r} is not valid {where}; valid: an absolute path, or the URI of a remote directory"
    )


def boolean(name: str, value: Any) -> bool:
    """Reads 1, true, yes and on in any case as True; 0, false, no and off as False."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in _TRUE + _FALSE:
        return value.strip().lower() in _TRUE
    raise ValueError(f"{name}: {value!r} is neither true nor false; valid: {'/'.join(_TRUE)}, {'/'.join(_FALSE)}")


def count(minimum: int, name: str, value: Any) -> int:
    """Reads a whole number of at least ``minimum``."""
    if isinstance(value, str) and value.strip().lstrip("-").isascii() and value.strip().lstrip("-").isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name}: {value!r} is not valid; it must be a whole number of at least {minimum}")
    return value


def words(valid_words: tuple[str, ...], name: str, value: Any) -> tuple[str, ...]:
    """Reads one or more of ``valid_words``, from text with spaces or commas between them, or from a list of such."""
    items = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else ()
    chosen = [word for item in items for word in str(item).lower().replace(",", " ").split()]
    if not chosen:
        raise ValueError(f"{name}: {value!r} names nothing; valid: one or more of {', '.join(valid_words)}")
    for item in chosen:
        if item not in valid_words:
            raise ValueError(f"{name}: unknown value {item!r}; valid: one or more of {', '.join(valid_words)}")
    return tuple(dict.fromkeys(chosen))


def tools(name: str, value: Any) -> tuple[str, ...]:
    """Returns one or more of the tools that are known now."""
    return words(known_tools(), name, value)  # third parties register theirs


def memory_limit(name: str, value: Any) -> str:
    """Reads text that `parse_limit` understands."""
    parse_limit(name, limit := text(name, value))
    return limit


def numbers(name: str, value: Any) -> str:
    """Reads a list of steps or ranks as text: ``[1, 2]`` and ``"1,2"`` are the same, None and ``[]`` are ``none``."""
    if value is None or (isinstance(value, list | tuple) and not value):
        return NONE
    items = value if isinstance(value, list | tuple) else [value]
    if len(items) == 1 and isinstance(items[0], str):
        return text(name, items[0])
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise ValueError(f"{name}: {item!r} in {value!r} is not valid; valid: whole numbers of at least 0, or none")
    return ",".join(map(str, items))


def ranks(name: str, value: Any) -> str:
    """Reads a selection of ranks as text: ``[0, 8]`` is ``0,8``, ``[]`` is ``none``."""
    return numbers(name, value) if isinstance(value, list | tuple) else text(name, value)


def per_name(name: str, value: Any) -> str:
    """Reads numbers per target or role as text: a mapping ``{"train_actor": [1, 2]}`` is ``train_actor=1,2``."""
    if isinstance(value, Mapping):
        value = ";".join(f"{key}={numbers(name, key_numbers)}" for key, key_numbers in value.items())
    return numbers(name, value)


def word(valid_words: tuple[str, ...], name: str, value: Any) -> str:
    """Reads one of ``valid_words``."""
    if not isinstance(value, str) or value.strip().lower() not in valid_words:
        raise ValueError(f"{name}: {value!r} is not valid; valid: one of {', '.join(valid_words)}")
    return value.strip().lower()


DEFAULT_SHARE = 0.95
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_VALID = "valid: a size such as 64GiB or 500MB (of this process), or a share such as 80% (of the container's memory)"


def parse_limit(option: str, text: str) -> tuple[int | None, float]:
    """Reads ``64GiB`` (or ``64g``), ``64GB`` (decimal), ``1000000B`` or ``80%``. Refuses a number alone, because nobody
    who writes 12 means bytes.

    Returns how much memory may be in use, including what closing the window takes: the bound of this process's resident
    memory in bytes, or None, and the share of the memory of the container and of the machine, 0 to 1.
    Raises ValueError that names ``option``, the value and what would be valid.
    """
    if match := _SHARE.fullmatch(text.strip()):
        if 0 < (share := float(match[1]) / 100) <= 1:
            return None, share
    elif (match := _SIZE.fullmatch(text.strip())) and not text.strip()[-1].isdigit():
        decimal = match[2] and not match[3] and text.strip().lower().endswith("b")
        if size := int(float(match[1]) * (1000 if decimal else 1024) ** _POWERS[match[2].lower()]):
            return size, DEFAULT_SHARE
    raise ValueError(f"{option}: {text!r} is neither a size nor a share; {_VALID}")


#: The class of each tool's recorder, imported when the tool is chosen. Recorders stop in this order and start in the
#: reverse order: nsys is innermost, so that it records neither Kineto's start nor the writing of a trace.
BUILTIN = {
    "nsys": "megaprof.recorders.cuda_tools:NsysRecorder",
    "memory": "megaprof.recorders.cuda_tools:MemoryRecorder",
    "torch": "megaprof.recorders.torch_profiler:TorchRecorder",
}
#: Records every step rather than windows (`megaprof.recorders.timeline`), so it is no ``Recorder``.
TIMELINE = "timeline"
#: Tools of third parties that were registered in this process, each with the factory of its recorder.
registered: dict[str, object] = {}


def known_tools() -> tuple[str, ...]:
    """Returns the values that ``--profile-tool`` takes now."""
    return (*BUILTIN, TIMELINE, *registered)

"""What may stand in a record that somebody else may have written: every field by its type and its bounds.

A record is a frozen dataclass whose fields are annotated with their check, `Annotated[int, whole(0, 9)]`, and `build`
makes it from JSON. A check takes the value from the JSON and returns it as the dataclass holds it; the message of its
ValueError continues the name of the field.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast, get_type_hints

Check = Callable[[object], Any]
T = TypeVar("T")


def build(record: type[T], data: object) -> T:
    """`data` as the dataclass `record`. Unknown keys are ignored, so that a newer writer can be read; a missing one
    has the field's default. Raises ValueError that names the field."""
    if not isinstance(data, dict):
        raise ValueError(f"{short(data)} is not an object")
    values: dict[str, Any] = {}
    for name, check, required in _checks(cast(Any, record)):
        if name in data:
            try:
                values[name] = check(data[name])
            except ValueError as fault:
                raise ValueError(f"{name} {fault}") from None
        elif required:
            raise ValueError(f"{name} is missing")
    return record(**values)


class Record:
    """A record that is a file of its own."""

    def as_record(self) -> dict[str, Any]:
        """For JSON."""
        return {"version": 1, **dataclasses.asdict(cast(Any, self))}

    @classmethod
    def from_record(cls: type[T], record: dict[str, Any]) -> T:
        """Raises ValueError."""
        return build(cls, record)


def whole(least: int, most: int) -> Check:
    """A whole number from `least` to `most`."""

    def check(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"{short(value)} is not a whole number from {least} to {most}")
        return value

    return check


def number(least: float, most: float) -> Check:
    """A number from `least` to `most`, which is never NaN."""

    def check(value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"{short(value)} is not a number from {least:g} to {most:g}")
        return float(value)

    return check


def text(longest: int = 200, pattern: re.Pattern[str] | None = None) -> Check:
    """A text of 1 to `longest` printable characters, as a whole like `pattern`."""

    def check(value: object) -> str:
        if not isinstance(value, str) or not 0 < len(value) <= longest or not value.isprintable():
            raise ValueError(f"{short(value)} is not a text of 1 to {longest} printable characters")
        if pattern is not None and pattern.fullmatch(value) is None:
            raise ValueError(f"{short(value)} does not look like {pattern.pattern}")
        return value

    return check


def sentence(longest: int) -> Check:
    """A text for people, cut at `longest` characters, with a space for each character that cannot be shown."""

    def check(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f"{short(value)} is not a text")
        return printable(value[:longest])

    return check


def one_of(*known: str) -> Check:
    """One of these words."""

    def check(value: object) -> str:
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"{short(value)} is none of {', '.join(known)}")
        return value

    return check


def truth(value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{short(value)} is neither true nor false")
    return value


def optional(check: Check) -> Check:
    """What `check` takes, or null."""
    return lambda value: None if value is None else check(value)


def listing(check: Check, most: int) -> Check:
    """A list of at most `most` values that `check` takes, as a tuple."""

    def check_all(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or len(value) > most:
            raise ValueError(f"{short(value)} is not a list of at most {most}")
        return tuple(check(each) for each in value)

    return check_all


def nested(record: type[T]) -> Check:
    """Another record."""
    return lambda value: build(record, value)


def counted(count: int, noun: str) -> str:
    """``1 layer``, ``4 layers``, ``4 microbatches``."""
    return f"{count} {noun}" + ("" if count == 1 else "es" if noun.endswith("ch") else "s")


def of_several(run: int, runs: int, command: str) -> str:
    """That the files of several runs lie in a directory, which ``command`` reads, and how to see another one."""
    newest = run == runs
    which = "the newest" if newest else f"number {run}, where 1 is the oldest"
    other = f"{command} --run {run - 1 if newest else runs}"
    there = f"The files of {runs} runs lie here, and this is about {which}."
    return f"{there} To see {'the one before it' if newest else 'the newest'}: {other}"


def listed(names: Sequence[str], most: int = 8) -> str:
    """``a, b, c``; of more than `most` the first ones, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def ago(seconds: float) -> str:
    """`90` as ``1 min 30 s``."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole < 600 and whole % 60 else "")
    if whole < 172800:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} days"


def printable(value: str) -> str:
    """`value` with a space for each character that a terminal would act upon."""
    return "".join(character if character.isprintable() else " " for character in value)


def short(value: object) -> str:
    """`value` for a message, in at most 43 plain characters."""
    # Not all of it first: a long list would be written out as a whole.
    shown = ascii(value[:40] if isinstance(value, str | list | tuple) else value)
    return shown if len(shown) <= 40 else shown[:40] + "..."


@functools.cache
def _checks(record: Any) -> tuple[tuple[str, Check, bool], ...]:
    hints = get_type_hints(record, include_extras=True)
    return tuple(
        (field.name, hints[field.name].__metadata__[0], field.default is dataclasses.MISSING)
        for field in dataclasses.fields(record)
        if hasattr(hints[field.name], "__metadata__")
    )

"""Small pieces of text: counts, lists, durations, and names from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence


def counted(count: int, noun: str) -> str:
    """Returns ``1 layer``, ``4 layers`` or ``4 microbatches``."""
    return f"{count} {noun}" + ("" if count == 1 else "es" if noun.endswith("ch") else "s")


def of_several(run: int, runs: int, command: str) -> str:
    """Returns a sentence that says that the files of several runs lie in a directory, which one ``command`` reads, and
    how to see another."""
    newest = run == runs
    which = "the newest" if newest else f"number {run}, where 1 is the oldest"
    other = f"{command} --run {run - 1 if newest else runs}"
    there = f"The files of {runs} runs lie here, and this is about {which}."
    return f"{there} To see {'the one before it' if newest else 'the newest'}: {other}"


def listed(names: Sequence[str], most: int = 8) -> str:
    """Returns ``a, b, c``; of more than `most` names the first ones, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def ago(seconds: float) -> str:
    """Returns a duration for people: ``1 min 30 s`` for 90 seconds."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole < 600 and whole % 60 else "")
    if whole < 172800:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} days"


def printable(value: str) -> str:
    """Returns `value` with a space for each character that would control a terminal."""
    return "".join(character if character.isprintable() else " " for character in value)

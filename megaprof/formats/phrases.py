"""Small pieces of text: counts, lists, durations, names from elsewhere, and the exception whose text a user reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import methodcaller

import msgspec


class Unanswerable(Exception):
    """The input cannot answer what was asked; the message says why, on one line."""


def counted(count: int, noun: str) -> str:
    """Returns ``1 layer``, ``4 layers`` or ``4 microbatches``."""
    return f"{count} {noun}" + ("" if count == 1 else "es" if noun.endswith("ch") else "s")


def of_several(run: int, runs: int, command: str) -> str:
    """Returns a sentence that a directory has the files of several runs, which run ``command`` reads, and how to see
    another one."""
    newest = run == runs
    description = "the newest" if newest else f"number {run}, where 1 is the oldest"
    other_command = f"{command} --run {run - 1 if newest else runs}"
    statement = f"The files of {runs} runs lie here, and this is about {description}."
    return f"{statement} To see {'the one before it' if newest else 'the newest'}: {other_command}"


def listed(names: Sequence[object], limit: int = 8) -> str:
    """Returns ``a, b, c``. For more than `limit` names, returns the first ones and the number of the others."""
    return ", ".join(map(str, names[:limit])) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def ago(seconds: float) -> str:
    """Returns a duration for people: ``1 min 30 s`` for 90 seconds."""
    rounded = max(0, round(seconds))
    if rounded < 120:
        return f"{rounded} s"
    if rounded < 7200:
        return f"{rounded // 60} min" + (f" {rounded % 60} s" if rounded < 600 and rounded % 60 else "")
    if rounded < 172800:
        return f"{rounded // 3600} h {rounded % 3600 // 60} min"
    return f"{rounded // 86400} days"


def printable(value: str, instead: str = " ") -> str:
    """Returns `value` with `instead` for each character that would control a terminal, or that HTML forbids."""
    return "".join(character if character.isprintable() else instead for character in value)


def json_of(value: object) -> bytes:
    """Returns a document as JSON. Bytes of names of files that are not UTF-8 become question marks."""
    number = methodcaller("item")  # of a number of numpy's
    try:
        return msgspec.json.encode(value, enc_hook=number)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(value, enc_hook=number), ensure_ascii=False)
        return msgspec.json.encode(json.loads(text.encode("utf-8", "replace")))

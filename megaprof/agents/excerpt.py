"""Cuts a command's JSON down to a size that fits into a context window. The rest can be asked for, part by part.

A part is named by its path in the JSON: ``targets/0/stages``. In a list, a step of the path is a number, a range
(``stages/8:16``), or a field and its value (``status/rank=37``). In an object, it is a field (``~1`` for a slash in its
name) or a range of fields. A part that is left out is replaced by an object with its path under ``part``. Such an
object also ends a list whose remaining items are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from itertools import islice
from typing import Any

from megaprof.formats.phrases import Unanswerable

#: The most characters of an answer.
MOST = 12_000
#: The most numbers in a list of a summary; longer lists are left out.
_FEW_NUMBERS = 64
#: A detail with at most this many characters is not worth leaving out.
_SMALL = 120
_RANGE = re.compile(r"(\d*):(\d*)")


class _LeftOut(dict[str, Any]):
    """The object that replaces a list or an object that is left out; it is never cut itself."""

    def __init__(self, value: list[Any] | dict[str, Any], path: str) -> None:
        super().__init__(part=path, items=len(value), characters=len(written(value)))


def excerpt(document: Any, part: str = "", details: Collection[str] = ()) -> str:
    """Returns a part of a document as JSON of at most `MOST` characters; without a part, a summary of the document.

    ``details``: names of fields that a summary leaves out everywhere. Raises Unanswerable.
    """
    path, document = part.strip("/"), json.loads(written(document))  # tuples are lists in JSON
    content = find(document, path) if path else _without(document, details, "")
    return written(_cut(content, path, MOST))


def written(value: Any) -> str:
    """Returns ``value`` as JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def find(document: Any, path: str) -> Any:
    """Returns the part at a path. Raises Unanswerable, which says which parts there are, if it is none of them."""
    value, walked = document, ""
    for name in path.split("/"):
        try:
            value = _inside(value, name)
        except LookupError:
            holds = f"is a list of {len(value)}" if isinstance(value, list) else "has no parts"
            if isinstance(value, dict):
                holds = f"has {', '.join(list(value)[:40]) or 'nothing'}"
            raise Unanswerable(f"there is no part {path!r}; {walked or 'it'} {holds}") from None
        walked = f"{walked}/{name}".lstrip("/")
    return value


def _inside(value: Any, name: str) -> Any:
    """Returns the part of ``value`` that one step of a path names. Raises LookupError if there is none."""
    field = name.replace("~1", "/").replace("~0", "~")
    if isinstance(value, dict) and field in value:
        return value[field]
    if (span := _RANGE.fullmatch(name)) and isinstance(value, (dict, list)):
        start, stop = int(span[1] or 0), int(span[2] or len(value))
        return dict(islice(value.items(), start, stop)) if isinstance(value, dict) else value[start:stop]
    if isinstance(value, list):
        if name.isdecimal():
            return value[int(name)]
        field, _, field_value = field.partition("=")
        for item in value:
            if isinstance(item, dict) and field in item and str(item[field]) == field_value:
                return item
    raise LookupError(name)


def _below(path: str, name: object) -> str:
    segment = str(name).replace("~", "~0").replace("/", "~1")
    return f"{path}/{segment}" if path else segment


def _without(value: Any, details: Collection[str], path: str) -> Any:
    """Returns a document in which details and long lists of numbers are replaced."""
    if isinstance(value, dict):
        return {
            name: _LeftOut(child, _below(path, name))
            if name in details and isinstance(child, (dict, list)) and len(written(child)) > _SMALL
            else _without(child, details, _below(path, name))
            for name, child in value.items()
        }
    if isinstance(value, list):
        if len(value) > _FEW_NUMBERS and all(item is None or isinstance(item, (int, float)) for item in value):
            return _LeftOut(value, path)
        return [_without(item, details, _below(path, index)) for index, item in enumerate(value)]
    return value


def _cut(value: Any, path: str, limit: int) -> Any:
    """Returns as much of ``value`` as fits into ``limit`` characters. Numbers, and objects that replace something, are
    never cut."""
    if len(written(value)) <= limit or isinstance(value, _LeftOut):
        return value
    if isinstance(value, str):
        while value and (excess_characters := len(written(value)) + 1 - limit) > 0:
            value = value[:-excess_characters]
        return f"{value}…"
    if not isinstance(value, (dict, list)):
        return value
    shortened = _cut_object(value, path, limit) if isinstance(value, dict) else _cut_list(value, path, limit)
    return _LeftOut(value, path) if path and len(written(shortened)) > limit else shortened


def _cut_object(value: dict[str, Any], path: str, limit: int) -> Any:
    """Returns an object with its small fields whole; the other fields share the remaining characters. If there are too
    many fields even for that, returns only the first ones."""
    fields: dict[str, Any] = dict.fromkeys(value)
    remaining, fields_left = limit - 2, len(value)
    for name in sorted(value, key=lambda name: len(written(value[name]))):
        frame = len(written(name)) + 2
        fields[name] = _cut(value[name], _below(path, name), remaining // fields_left - frame)
        remaining -= len(written(fields[name])) + frame
        fields_left -= 1
    if remaining >= 0:
        return fields
    remaining = limit - len(written({"left_out": _LeftOut(value, _below(path, f"{len(value)}:"))}))
    fields = {}
    for name, child in value.items():
        piece = _cut(child, _below(path, name), 2 * _SMALL)
        remaining -= len(written(name)) + len(written(piece)) + 2
        if remaining < 0:
            break
        fields[name] = piece
    rest = dict(islice(value.items(), len(fields), None))
    return {**fields, "left_out": _LeftOut(rest, _below(path, f"{len(fields)}:"))}


def _cut_list(value: list[Any], path: str, limit: int) -> Any:
    """Returns the first items that fit whole, or else a piece of the first item, followed by the path of the rest."""
    remaining = limit - len(written([_LeftOut(value, _below(path, f"{len(value)}:"))]))
    items: list[Any] = []
    for item in value:
        size = len(written(item)) + 1
        if size > remaining:
            break
        items.append(item)
        remaining -= size
    if not items and remaining > 2 * _SMALL:
        items.append(_cut(value[0], _below(path, 0), remaining - 1))
    if not items:
        return _LeftOut(value, path)
    rest = value[len(items) :]
    return [*items, _LeftOut(rest, _below(path, f"{len(items)}:"))] if rest else items

"""Excerpts of any JSON fit, and everything that is left out can be asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megaprof.agents.excerpt import MOST, excerpt, find, written
from megaprof.formats.phrases import Unanswerable

_NAMES = st.text("abcdefgh/~:=é", min_size=1, max_size=12)
_SCALARS = st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(-1e9, 1e9) | st.text(max_size=3000)
_DOCUMENTS = st.recursive(
    _SCALARS, lambda below: st.lists(below, max_size=60) | st.dictionaries(_NAMES, below, max_size=60), max_leaves=60
)


def left_out(value: Any) -> Iterator[dict[str, Any]]:
    """What stands in the place of parts."""
    if isinstance(value, dict):
        if value.keys() == {"part", "items", "characters"}:
            yield value
            return
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from left_out(each)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(document=st.dictionaries(_NAMES, _DOCUMENTS, max_size=40), times=st.integers(1, 60))
def test_an_excerpt_of_any_document_fits_and_names_what_it_leaves_out(document: dict[str, Any], times: int) -> None:
    whole = {"many": [document] * times, **document}
    for part in ("", "many", "many/0"):
        text = excerpt(whole, part)
        assert len(text) <= MOST
        for each in left_out(json.loads(text)):
            found = find(whole, each["part"])
            assert (each["items"], each["characters"]) == (len(found), len(written(found)))


def everything(document: Any, part: str) -> Any:
    """A list as an agent collects it: what it is shown, and then whatever it is told that is left out."""
    shown = json.loads(excerpt(document, part))
    if isinstance(shown, dict):
        return everything(document, shown["part"]) if shown.keys() == {"part", "items", "characters"} else shown
    *items, last = shown
    if isinstance(last, dict) and "characters" in last:
        return items + everything(document, last["part"])
    return shown


def test_a_long_list_can_be_read_to_its_end() -> None:
    ranks = [{"rank": rank, "since": 1.5 * rank} for rank in range(5000)]
    assert everything({"status": ranks}, "status") == ranks


def test_an_object_with_very_many_fields_is_cut_and_goes_on() -> None:
    many = {f"module {number}": {"mean": number, "text": "x" * 500} for number in range(2000)}
    shown = json.loads(excerpt({"modules": many}, "modules"))
    rest = shown.pop("left_out")
    assert len(shown) > 10
    assert rest["items"] == 2000 - len(shown)
    assert next(iter(find({"modules": many}, rest["part"]))) == f"module {len(shown)}"


def test_a_summary_leaves_details_and_long_rows_of_numbers_out_and_keeps_what_is_small() -> None:
    document = {
        "notes": ["Stage 0 is slow."],
        "stages": [{"pp": pp, "compute_ms": 1.5} for pp in range(64)],
        "few": {"stages": [{"pp": 0}]},
        "buckets": list(range(65)),
        "row": list(range(64)),
    }
    assert json.loads(excerpt(document, details=["stages"])) == {
        "notes": ["Stage 0 is slow."],
        "stages": {"part": "stages", "items": 64, "characters": len(written(document["stages"]))},
        "few": {"stages": [{"pp": 0}]},
        "buckets": {"part": "buckets", "items": 65, "characters": len(written(document["buckets"]))},
        "row": list(range(64)),
    }


@pytest.mark.parametrize(
    ("part", "found"),
    [
        ("targets/0/stages/1/pp", 7),
        ("/targets/0/stages/pp=7", {"pp": 7, "a/b": [1, 2, 3]}),
        ("targets/0/stages/pp=7/a~1b/1:", [2, 3]),
        ("targets/0/stages/:1", [{"pp": 0}]),
        ("targets/0/stages/1/:1", {"pp": 7}),
    ],
)
def test_parts_are_asked_for_by_path(part: str, found: object) -> None:
    document = {"targets": ({"stages": ({"pp": 0}, {"pp": 7, "a/b": (1, 2, 3)})},)}
    assert json.loads(excerpt(document, part)) == found


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("stage", "there is no part 'stage'; it has stages, note"),
        ("stages/7", "there is no part 'stages/7'; stages is a list of 2"),
        ("stages/pp=9", "stages is a list of 2"),
        ("note/x", "note has no parts"),
    ],
)
def test_a_part_that_is_not_there_is_answered_with_those_that_are(part: str, says: str) -> None:
    with pytest.raises(Unanswerable, match=r"^there is no part") as fault:
        excerpt({"stages": [{"pp": 0}, {"pp": 1}], "note": "x"}, part)
    assert says in str(fault.value)

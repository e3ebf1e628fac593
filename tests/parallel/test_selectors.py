from __future__ import annotations

import re
from itertools import permutations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megaprof.parallel.selectors import ALL, PER_STAGE, Selector, join_spans, parse_selector, spans_of
from megaprof.parallel.topology import AXES, DEFAULT_ORDER, ParallelSizes, WorldLayout
from tests.parallel.test_topology import everybody

# 32 ranks: every axis larger than one, and an expert grid unlike the decoder's.
SIZES = ParallelSizes(tp=2, pp=4, cp=2, ep=4, etp=1, dp=2)
LAYOUT = WorldLayout(SIZES)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("0", [0]),
        ("0,8,16", [0, 8, 16]),
        (" 16 , 0,8 ", [0, 8, 16]),
        ("0-2,30-31,1", [0, 1, 2, 30, 31]),
        ("all", list(range(32))),
        ("ALL", list(range(32))),
        ("pp=*", list(range(32))),
        ("per-stage", [0, 8, 16, 24]),
        ("Per-Stage", [0, 8, 16, 24]),
        ("pp=*,tp=0,dp=0,cp=0", [0, 8, 16, 24]),
        ("pp=0|3", [*range(8), *range(24, 32)]),
        (" PP = 0 | 2 - 3 , tp=1,cp=1 ", [3, 7, 19, 23, 27, 31]),
        ("pp=0-1,ep=*", list(range(16))),
        ("ep=3", [3, 7, 11, 15, 19, 23, 27, 31]),
        ("ep=3,tp=1,pp=0", [3, 7]),
    ],
)
def test_what_is_selected(text: str, ranks: list[int]) -> None:
    selector = parse_selector(text)
    selector.check(SIZES, LAYOUT)
    assert selector.ranks(LAYOUT.sizes, LAYOUT) == ranks
    assert [coords.rank for coords in everybody(LAYOUT) if selector.selects(coords)] == ranks


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("3,1,2,9", "1-3,9"),
        ("0-4,2-6", "0-6"),
        ("dp=0, PP=3|0|1", "pp=0-1|3,dp=0"),
        ("pp=*,tp=*", "all"),
        ("cp=0,dp=0,tp=0", "per-stage"),
    ],
)
def test_equal_selections_are_equal_selectors(text: str, canonical: str) -> None:
    assert str(parse_selector(text)) == canonical
    assert parse_selector(text) == parse_selector(canonical)


def test_per_stage_is_the_lowest_rank_of_each_stage_in_every_order() -> None:
    orders = 0
    for order in permutations(DEFAULT_ORDER.split("-")):
        try:
            layout = WorldLayout(ParallelSizes(tp=2, pp=2, cp=2, ep=2, etp=2, dp=4), "-".join(order))
        except ValueError:  # Megatron refuses this order for these sizes
            continue
        orders += 1
        lowest = [min(coords.rank for coords in everybody(layout) if coords.pp == pp) for pp in range(2)]
        assert PER_STAGE.ranks(layout.sizes, layout) == sorted(lowest)
    assert orders > 24  # more than the orders with pp last


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--profile-select: empty value ''; valid: all, per-stage, ranks such as"),
        ("  ", "empty value"),
        (None, "empty value None"),
        (3, "empty value 3"),
        ("xp=0", "--profile-select: unknown coordinate 'xp' in 'xp=0'; known: tp, pp, cp, ep, dp"),
        ("pp=0,XP=0", "unknown coordinate 'xp'"),
        ("=0", "unknown coordinate ''"),
        ("-1", "'-1' in '-1' is not a number from 0 or a range"),
        ("pp=-1", "'-1' in 'pp=-1' is not a number"),
        ("0--1", "'0--1'"),
        ("7-0", "reversed range '7-0' in '7-0'; write 0-7"),
        ("pp=2-0", "reversed range '2-0' in 'pp=2-0'; write 0-2"),
        ("0,", "'' in '0,' is not a number"),
        ("pp=", "'' in 'pp=' is not a number"),
        ("pp=0|", "'' in 'pp=0|' is not a number"),
        ("pp=*|0", r"'\*' in 'pp=\*|0' is not a number"),
        ("pp=0,pp=1", r"coordinate 'pp' stands twice in 'pp=0,pp=1'; write pp=0\|3"),
        ("pp=0,8", "'8' in 'pp=0,8' is no coordinate"),
        ("all,0", "'all' in 'all,0' is not a number"),
        ("everything", "'everything' in 'everything' is not a number"),
        ("1.5", "'1.5'"),
        ("\N{SUPERSCRIPT TWO}", "is not a number"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_selector(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("32", r"--profile-select: rank 32 in '32' is outside the world of 32 ranks \(valid: 0..31\)"),
        ("0,30-99", "rank 99 in '0,30-99' is outside the world of 32 ranks"),
        ("pp=4", "--profile-select: pp=4 in 'pp=4' does not exist; pp has stages 0..3"),
        ("pp=0-9,tp=0", "pp=9 in 'tp=0,pp=0-9' does not exist; pp has stages 0..3"),
        ("tp=2", r"tp=2 in 'tp=2' does not exist; tp has ranks 0..1"),
        ("ep=4", "ep has ranks 0..3"),
        ("ep=1,tp=0", "'tp=0,ep=1' selects no rank at all: .* order tp-cp-ep-dp-pp"),
        ("0-99999999999999999999", "rank 99999999999999999999"),
    ],
)
def test_what_does_not_exist_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_selector(text).check(SIZES, LAYOUT)


def test_an_axis_of_one_says_so() -> None:
    with pytest.raises(ValueError, match="pp has stage 0 only"):
        parse_selector("pp=1").check(ParallelSizes(dp=4))


def test_without_the_order_an_empty_combination_is_not_guessed() -> None:
    parse_selector("ep=1,tp=0").check(SIZES)


def test_a_world_of_131072_ranks() -> None:
    sizes = ParallelSizes(tp=8, pp=16, cp=2, ep=64, etp=1, dp=512)
    layout = WorldLayout(sizes)
    for text in ("0", "0-131071", "all", "per-stage", "pp=*,tp=0,dp=0", "ep=63,pp=15"):
        parse_selector(text).check(sizes, layout)
    with pytest.raises(ValueError, match="no rank at all"):  # ep counts tp fastest, so odd ep has odd tp
        parse_selector("tp=0,ep=1").check(sizes, layout)
    assert len(parse_selector("per-stage").ranks(sizes, layout) or ()) == 16
    assert len(parse_selector("all").ranks(sizes, layout) or ()) == 131_072


numbers = st.integers(0, 40)
spans = st.builds(lambda a, b: f"{min(a, b)}-{max(a, b)}", numbers, numbers) | numbers.map(str)
values = st.just("*") | st.lists(spans, min_size=1, max_size=4).map("|".join)
rank_lists = st.lists(spans, min_size=1, max_size=5).map(",".join)
coordinates = st.dictionaries(st.sampled_from(AXES), values, min_size=1).map(
    lambda wanted: ",".join(f"{axis}={value}" for axis, value in wanted.items())
)
selector_texts = st.sampled_from(["all", "per-stage"]) | rank_lists | coordinates


def brute_force(text: str, layout: WorldLayout) -> list[int]:
    """The grammar read naively, number by number."""

    def has(value: str, number: int) -> bool:
        parts = [part.split("-") for part in re.split("[|,]", value)]
        return value == "*" or any(int(part[0]) <= number <= int(part[-1]) for part in parts)

    if text == "all":
        return [coords.rank for coords in everybody(layout)]
    if text == "per-stage":
        return sorted(
            min(coords.rank for coords in everybody(layout) if coords.pp == pp) for pp in range(layout.sizes.pp)
        )
    if "=" not in text:
        return [coords.rank for coords in everybody(layout) if has(text, coords.rank)]
    wanted = dict(item.split("=") for item in text.split(","))
    return [c.rank for c in everybody(layout) if all(has(value, getattr(c, axis)) for axis, value in wanted.items())]


layouts = st.sampled_from(
    [
        LAYOUT,
        WorldLayout(ParallelSizes(tp=2, pp=2, cp=2, ep=4, etp=1, dp=2), "tp-cp-ep-pp-dp"),
        WorldLayout(ParallelSizes(tp=2, pp=3, ep=2, dp=4), "dp-ep-tp-cp-pp"),
        WorldLayout(ParallelSizes()),
    ]
)


@given(selector_texts, layouts)
def test_selection_agrees_with_brute_force(text: str, layout: WorldLayout) -> None:
    selector = parse_selector(text)
    expected = brute_force(text, layout)
    assert selector.ranks(layout.sizes, layout) == expected
    assert [coords.rank for coords in everybody(layout) if selector.selects(coords)] == expected
    named = [(layout.sizes.world, selector.rank_spans)] if selector.rank_spans is not None else []
    named += [(getattr(layout.sizes, axis), spans) for axis, spans in selector.axes]
    exists = all(last < size for size, spans in named for _, last in spans)
    if exists and expected:
        selector.check(layout.sizes, layout)
    else:
        with pytest.raises(ValueError, match=r"outside the world|does not exist|no rank at all"):
            selector.check(layout.sizes, layout)


@given(selector_texts)
def test_text_round_trip(text: str) -> None:
    selector = parse_selector(text)
    assert parse_selector(str(selector)) == selector
    assert str(parse_selector(str(selector))) == str(selector)


@given(st.text() | st.text(alphabet="0123456789-,|=* tpcdealrsg"))
@example("9" * 5000)
@example("0-" + "9" * 4000)
def test_any_text_is_a_selector_or_a_value_error(text: str) -> None:
    try:
        selector = parse_selector(text)
    except ValueError:
        return
    assert isinstance(selector, Selector)
    assert parse_selector(str(selector)) == selector
    assert selector.ranks(LAYOUT.sizes, LAYOUT) == [
        coords.rank for coords in everybody(LAYOUT) if selector.selects(coords)
    ]


def test_all_is_no_constraint() -> None:
    assert ALL == Selector() == parse_selector("all")
    assert hash(ALL) == hash(parse_selector("pp=*"))


@pytest.mark.parametrize(("numbers", "text"), [([], ""), ([3], "3"), ([9, 3, 8, 8, 10, 15], "3,8-10,15")])
def test_numbers_in_their_shortest_form(numbers: list[int], text: str) -> None:
    assert join_spans(spans_of(numbers), ",") == text
    assert sorted({n for first, last in spans_of(numbers) for n in range(first, last + 1)}) == sorted(set(numbers))


def test_messages_name_the_option_that_was_used() -> None:
    with pytest.raises(ValueError, match=r"^--ranks: 'x'"):
        parse_selector("0,x", "--ranks")
    with pytest.raises(ValueError, match=r"^--profile-ranks: rank 9 in '9' is outside the world"):
        parse_selector("9").check(ParallelSizes(dp=4), option="--profile-ranks")

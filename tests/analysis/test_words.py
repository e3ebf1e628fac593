"""Numbers with the digits that they deserve, and plural forms."""

from __future__ import annotations

import pytest

from megaprof.analysis import words
from megaprof.analysis.samples import Spread
from megaprof.formats.metadata import ModelChunk


@pytest.mark.parametrize(
    ("ms", "text"),
    [(None, "-"), (9.876, "9.88"), (61.512, "61.5"), (123.45, "123"), (-9.876, "-9.88"), (-0.001, "0.00")],
)
def test_three_digits_of_milliseconds(ms: float | None, text: str) -> None:
    assert words.number(ms) == text


@pytest.mark.parametrize(
    ("ms", "error", "text"),
    [(216.94, 1.21, "217 ±1"), (39.88, 0.34, "39.9 ±0.3"), (5.0, 0.0, "5.00 ±0.00"), (1096.7, 13.0, "1097 ±13")],
)
def test_a_time_and_its_error_have_the_same_digits(ms: float, error: float, text: str) -> None:
    assert words.with_spread(Spread(ms, ms, ms, ms, error, 2)) == text


def test_a_single_sample_has_no_spread() -> None:
    assert words.with_spread(Spread.of([7.0])) == "7.00"
    assert words.with_spread(Spread.of([7.0, 8.0])) == "7.5 ±0.5"
    assert words.with_spread(None) == words.mean(None) == words.reach(None) == "-"
    assert words.reach(Spread.of([7.0, 8.0, 12.0])) == "8.00 (7.00 - 12.0)"


@pytest.mark.parametrize(
    ("fraction", "text", "signed"),
    [(0.534, "53%", "+53%"), (0.034, "3.4%", "+3.4%"), (-0.0001, "0.0%", "+0.0%"), (-0.5, "-50%", "-50%")],
)
def test_percent(fraction: float, text: str, signed: str) -> None:
    assert (words.percent(fraction), words.percent(fraction, sign=True)) == (text, signed)


def test_plural_forms() -> None:
    assert [words.counted(n, "layer") for n in (0, 1, 2)] == ["0 layers", "1 layer", "2 layers"]
    assert words.counted(2, "microbatch") == "2 microbatches"
    assert [words.stages({3}), words.stages({4, 0, 2, 3})] == ["stage 3", "stages 0, 2-4"]
    assert [words.steps([3]), words.steps([5, 2]), words.ranks(range(9))] == ["step 3", "steps 2, 5", "ranks 0-8"]
    assert words.steps([80, 82, *range(84, 90), 95, 99]) == "10 steps from 80 to 99"
    assert words.spans(range(0, 40, 2), most=3) == "0, 2, 4 and 17 more"


def test_long_times_are_in_seconds() -> None:
    assert [words.milliseconds(ms) for ms in (61.512, 9_999.0, 12_340.0)] == ["61.5 ms", "9999 ms", "12.3 s"]


def test_layers() -> None:
    first = ModelChunk(embedding=True, layers=2, layer_numbers=None, mtp=0, loss=False, kinds=None)
    last = ModelChunk(embedding=False, layers=3, layer_numbers=None, mtp=1, loss=True, kinds=None)
    assert [words.layers([first]), words.layers([first, last])] == ["emb+2", "emb+5+1mtp+loss"]
    assert words.layers([None]) == words.layers([]) == "?"


def test_sentences() -> None:
    assert words.sentence("a rank is slow") == "A rank is slow."
    assert words.sentence("A capture shows why:") == "A capture shows why:"


def test_a_large_change_is_told_in_words() -> None:
    assert [words.percent(x, sign=True) for x in (0.5, -0.5, 8.9, 9.0, 239.0, 6100.0)] == [
        "+50%",
        "-50%",
        "+890%",
        "10 times",
        "240 times",
        "thousands of times",
    ]
    assert words.percent(12.0) == "1200%"

"""What megaprof answers about fixed inputs is what it answered before, unless somebody accepted the difference."""

from __future__ import annotations

import pytest

from tests.golden import answers


@pytest.mark.parametrize("name", answers.NAMES)
def test_the_answer_is_the_expected_one(name: str) -> None:
    found = answers.complaint(name, answers.answer(name))
    assert not found, f"\n{found}"


def test_every_expected_answer_has_an_input() -> None:
    assert {path.stem for path in answers.EXPECTED.iterdir()} == set(answers.NAMES)


def test_what_differs() -> None:
    was = {"a": 1, "b": 2.0, "c": [1.0, "x"], "d": {"e": None}}
    assert not list(answers.differences(was, {"a": 1, "b": 2.001, "c": [1.0 + 1e-9, "x"], "d": {"e": None}}))
    assert list(answers.differences(was, {"a": 2, "b": 2.01, "c": [1.0], "d": {"f": None}})) == [
        ".a: 1 -> 2",
        ".b: 2.0 -> 2.01",
        ".c has 1 entries and not 2",
        ".d.e is gone",
        ".d.f is new",
    ]

"""The one rule that says who is slow."""

from __future__ import annotations

import pytest

from megaprof.analysis.stages.slow import EXCESS, exceeds


@pytest.mark.parametrize(
    ("own", "usual", "slow"), [(1.11, 1.0, True), (1.09, 1.0, False), (0.5, 1.0, False), (111.0, 100.0, True)]
)
def test_more_than_the_threshold(own: float, usual: float, slow: bool) -> None:
    assert EXCESS == 0.10
    assert exceeds(own, usual) is slow


def test_more_than_chance() -> None:
    assert exceeds(1.3, 1.0, error=0.1, errors=2.0)  # a quarter of a logarithm is more than two tenths
    assert not exceeds(1.3, 1.0, error=0.1, errors=6.0)


def test_more_than_its_peers_usually_differ_by() -> None:
    assert not exceeds(1.3, 1.0, least=0.5)
    assert exceeds(1.6, 1.0, least=0.5)


@pytest.mark.parametrize(("own", "usual"), [(1.0, 0.0), (0.0, 0.0), (float("nan"), 1.0), (1.0, float("nan"))])
def test_nothing_exceeds_what_is_no_time(own: float, usual: float) -> None:
    assert not exceeds(own, usual)

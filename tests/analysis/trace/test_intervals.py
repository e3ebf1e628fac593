"""Sets of time intervals."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megaprof.analysis.trace.intervals import busy, covered, difference, intersection, intervals, leaves, total, union

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda p: (p[0], p[0] + p[1])), max_size=12)


def points(spans):
    return {t for start, end in spans for t in range(start, end)}


@given(SPANS, SPANS)
def test_interval_algebra_agrees_with_sets_of_points(left, right):
    a, b = union(intervals(left)), union(intervals(right))
    assert points(a.tolist()) == points(left)
    assert total(a) == len(points(left))
    assert points(intersection(a, b).tolist()) == points(left) & points(right)
    assert points(difference(a, b).tolist()) == points(left) - points(right)
    assert covered(a, intervals(right)).tolist() == [len(points(left) & points([span])) for span in right]


def test_leaves_contain_no_other_interval_of_their_thread():
    spans = intervals([(0, 100), (0, 50), (10, 20), (30, 50), (60, 90), (60, 80), (200, 300)])
    threads = np.array([1, 1, 1, 1, 1, 2, 1])
    assert leaves(threads, spans).tolist() == [False, False, True, True, True, True, True]


def test_busy_counts_what_overlaps_once_for_each_owner_and_what_is_hidden_not_at_all() -> None:
    spans = intervals([(0, 10), (5, 15), (5, 15), (20, 20), (40, 50), (100, 200)])
    owners = np.array([0, 0, 2, 1, 2, -1])
    assert busy(owners, spans, 4).tolist() == [15, 0, 20, 0]
    assert busy(owners, spans, 4, hidden_by=intervals([(8, 45)])).tolist() == [8, 0, 8, 0]
    assert busy(owners[:0], spans[:0], 2).tolist() == [0, 0]

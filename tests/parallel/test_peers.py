"""Since when a cause is there, of steps written as a row: x where it is, . where it is not."""

import numpy as np
import pytest

from megaprof.parallel.peers import began


@pytest.mark.parametrize(
    ("there", "since"),
    [
        ("xxxxxxxxxxxx", 0),
        ("......xxxxxx", 6),
        ("..........xx", 10),
        ("...........x", None),
        (".x....xxxxxxxxxxxx.x", 6),  # a machine that is busy now and then
        ("..x.....xxx.xxxxx.xxxxxx", 8),
        ("x.x.x.x.x.x.x.x.", None),
        ("..x....x...x...x", None),
        ("xxxxxx......", None),
        ("..xxxx", 2),
        (".xxx.x", None),  # some steps are quicker, and the first is one of them by chance
    ],
)
def test_a_cause_is_there_since_the_step_that_leaves_fewest_exceptions(there: str, since: int | None) -> None:
    assert began(np.array([letter == "x" for letter in there])) == since

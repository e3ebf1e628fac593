"""What one look at a job says in sentences."""

from __future__ import annotations

from megaprof.cli.look import cores_sentence


def test_ranks_that_wait_for_a_core_are_named_by_the_rule_of_the_report() -> None:
    said = cores_sentence({2: 0.74, 0: 0.40, 1: 0.20})
    assert said.endswith(": something else runs on the cores, or there are more ranks than cores.")
    assert said.startswith("Ranks 0, 2 wait for a processor core, rank 2 for 74% of the time")  # not 1
    assert cores_sentence({2: 0.74, 1: 0.20}).startswith("Rank 2 waits for a processor core, for 74% of the time")

"""A cause costs what the same run takes less without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaprof.analysis.report.report import analyze
from tests.analysis.scenarios import Scenario, write

BOTH = ("forward", "backward")
TWICE = ((2, 2), (2, 2), (2, 2), (2, 2))
CPU = Scenario("cpu", gpu=False)


@pytest.mark.parametrize(
    ("kind", "scenario", "without"),
    [
        ("slow_rank", Scenario("rank", peers=2, slow={1: 1.4}), {"slow": {}}),
        ("slow_forward", Scenario("forward", stretched={(1, "forward", None): 1.8}), {"stretched": {}}),
        ("recomputation", replace(CPU, stretched={(2, "backward", None): 1.5}), {"stretched": {}}),
        ("slow_chunk", replace(CPU, layers=TWICE, stretched={(1, k, 1): 1.6 for k in BOTH}), {"stretched": {}}),
        ("slow_link", Scenario("link", link={1: 12.0}), {"link": {}}),
        ("slow_link", replace(CPU, link={2: 20.0}), {"link": {}}),
        # The other link, which says what an exchange should take, has a stage in common with the slow one.
        ("slow_link", replace(CPU, layers=(4, 4, 4), link={1: 15.0}, transfer=1.5, microbatches=12), {"link": {}}),
        ("late_entry", replace(CPU, late={0: 200.0}, steps=4, merged=True), {"late": {}}),
        ("late_entry", replace(CPU, late={2: 300.0}, steps=4, merged=True), {"late": {}}),
        ("data_wait", replace(CPU, data=150.0, steps=3), {"data": 0.0}),
        ("uneven_microbatches", Scenario("uneven", uneven=0.6), {"uneven": 0.0}),
    ],
)
def test_what_a_cause_costs(kind: str, scenario: Scenario, without: dict[str, Any], tmp_path: Path) -> None:
    steps = []
    for number, each in enumerate((scenario, replace(scenario, **without))):
        directory = tmp_path / str(number)
        write(each, directory)
        (target,) = analyze(directory).targets
        steps.append(target.measured.step_time_ms.mean)
        if number == 0:
            (cause,) = target.verdict.causes
    assert cause.kind == kind
    assert cause.gain_ms == pytest.approx(steps[0] - steps[1], rel=0.1)


def test_what_costs_most_comes_first(tmp_path: Path) -> None:
    write(Scenario("two", layers=(6, 4, 4, 4), peers=2, slow={2: 1.3}), tmp_path)
    (target,) = analyze(tmp_path).targets
    gains = [cause.gain_ms for cause in target.verdict.causes]
    assert len(gains) == 2
    assert gains == sorted(gains, reverse=True)

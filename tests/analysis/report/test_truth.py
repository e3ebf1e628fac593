"""Does the report name what is wrong, and blame nobody where nothing is? Runs whose answer is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaprof.analysis.report.report import TargetReport, analyze
from tests.analysis.scenarios import Scenario, write

EIGHT = (4,) * 8
TWICE = ((2, 2), (2, 2), (2, 2), (2, 2))
BOTH = ("forward", "backward")

HEALTHY = [
    Scenario("healthy, pp=4"),
    Scenario("healthy, pp=2", layers=(4, 4)),
    Scenario("healthy, pp=8", layers=EIGHT, microbatches=32),
    Scenario("healthy, pp=4 vpp=2", layers=TWICE),
    Scenario("healthy, pp=4 tp=2, both peers captured", peers=2),
    Scenario("healthy, noise 8 %", noise=0.08),
    Scenario("healthy, noise 8 %, tp=2 peers", noise=0.08, peers=2),
    Scenario("healthy, dp=2, short gradient reduction", dp=2, tail=20.0),
    Scenario("healthy, a little exposed tp", {"communication:tp": 5.0}, exposed={"tp": 0.05}),
    Scenario("healthy, hosts with clocks of their own", apart=True),
    Scenario("healthy, log probs", target="train_log_probs"),
    Scenario("healthy, two steps", steps=2),
    Scenario("healthy, no pipeline", layers=(8,)),
    Scenario("healthy, small embedding and loss", {"embedding_or_loss:3": 3.2}, embedding=0.5, loss=1.5),
    Scenario("healthy, microbatches differ a little", {"uneven_microbatches": 5.6}, uneven=0.15),
    Scenario("healthy, CPU", gpu=False),
    Scenario("healthy, CPU, noise 8 %", gpu=False, noise=0.08),
    Scenario("healthy, one hiccup", hiccups={1: (0, "forward", 5)}),
    Scenario("healthy, one hiccup of three steps, CPU", gpu=False, steps=3, hiccups={0: (1, "forward", 0)}),
    Scenario("healthy, a hiccup on every stage", hiccups={pp: (0, "forward", 3 + pp) for pp in range(4)}),
    Scenario("healthy, noise 8 %, CPU, three steps", gpu=False, noise=0.08, steps=3, merged=True),
    Scenario("healthy, a slow first step", steps=3, first_step=3.0),
    Scenario("healthy, layers not counted", counted=False, loss=1.0),
    Scenario("healthy, one rank closes its windows late, CPU", late={0: 200.0}, steps=4, gpu=False),
    Scenario("healthy, vpp=2, microbatches differ a little", layers=TWICE, uneven=0.15),
    Scenario("healthy, other load in bursts, log probs, CPU", target="train_log_probs", gpu=False, load=0.2, steps=3),
    Scenario("healthy, tiny, a profiler's start, CPU", layers=(2, 2), layer=1.0, gpu=False, opening=4.0, steps=3),
]
SINGLE = [
    Scenario("more layers on the first stage", {"layers:0": 23.4}, layers=(6, 4, 3, 3)),
    Scenario("more layers in the middle", {"layers:1": 17.5}, layers=(4, 6, 4, 4)),
    Scenario("more layers on the last stage", {"layers:3": 20.3}, layers=(4, 4, 4, 6), loss=1.0),
    Scenario("more layers, pp=2", {"layers:0": 28.9}, layers=(6, 2)),
    Scenario("more layers, pp=8", {"layers:5": 22.5}, layers=(4, 4, 4, 4, 4, 6, 4, 4), microbatches=32),
    Scenario("more layers, vpp=2", {"layers:2": 21.2}, layers=((2, 2), (2, 2), (3, 3), (2, 2))),
    Scenario("more layers, log probs", {"layers:1": 26.6}, layers=(4, 7, 4, 4), target="train_log_probs"),
    Scenario("more layers, CPU", {"layers:2": 19.0}, layers=(4, 4, 6, 4), gpu=False),
    Scenario("more layers, clocks apart", {"layers:2": 19.0}, layers=(4, 4, 6, 4), apart=True),
    Scenario("a heavy loss", {"embedding_or_loss:3": 17.3}, loss=8.0),
    Scenario("a heavy loss, pp=8", {"embedding_or_loss:7": 20.1}, layers=EIGHT, loss=8.0, microbatches=32),
    Scenario("a heavy embedding", {"embedding_or_loss:0": 13.3}, embedding=8.0),
    Scenario("a heavy MTP layer", {"embedding_or_loss:3": 18.9}, mtp=9.0),
    Scenario("a heavy loss, CPU", {"embedding_or_loss:3": 17.0}, loss=8.0, gpu=False),
    Scenario("a slow rank", {"slow_rank:1": 21.8}, peers=2, slow={1: 1.4}),
    Scenario("a slow rank on the last stage", {"slow_rank:3": 18.9}, peers=2, slow={3: 1.3}),
    Scenario("a slow rank, pp=2", {"slow_rank:0": 29.6}, layers=(4, 4), peers=2, slow={0: 1.5}),
    Scenario("a slow rank, vpp=2", {"slow_rank:2": 24.9}, layers=TWICE, peers=2, slow={2: 1.4}),
    Scenario("a slow rank, CPU", {"slow_rank:1": 21.7}, peers=2, slow={1: 1.4}, gpu=False),
    Scenario("uneven microbatches", {"uneven_microbatches": 16.5}, uneven=0.6),
    Scenario("uneven microbatches, pp=2", {"uneven_microbatches": 14.0}, layers=(4, 4), uneven=0.5),
    Scenario("uneven microbatches, log probs", {"uneven_microbatches": 8.1}, uneven=0.6, target="train_log_probs"),
    Scenario("uneven microbatches, vpp=2", {"uneven_microbatches": 9.0}, layers=TWICE, uneven=0.6),
    Scenario("uneven microbatches, CPU", {"uneven_microbatches": 25.6}, uneven=0.6, gpu=False),
    Scenario("exposed tp", {"communication:tp": 30.0}, exposed={"tp": 0.3}),
    Scenario("exposed ep", {"communication:ep": 30.0}, exposed={"ep": 0.3}),
    Scenario("exposed cp", {"communication:cp": 25.0}, exposed={"cp": 0.25}),
    Scenario("exposed ep, vpp=2", {"communication:ep": 30.0}, layers=TWICE, exposed={"ep": 0.3}),
    Scenario("exposed tp, no pipeline", {"communication:tp": 30.0}, layers=(8,), exposed={"tp": 0.3}),
    Scenario(
        "exposed tp, without operators of the CPU",
        {"communication:unknown": 29.5},
        exposed={"tp": 0.3},
        dp=2,
        tail=20.0,
        operators=False,
    ),
    Scenario("exposed tp, CPU", {"communication:tp": 30.0}, exposed={"tp": 0.3}, gpu=False),
    Scenario("a long gradient reduction", {"communication:dp": 17.6}, dp=2, tail=250.0),
    Scenario("a long gradient reduction, CPU", {"communication:dp": 17.6}, dp=2, tail=250.0, gpu=False),
    Scenario("a slow network between stages", {"communication:pp": 22.1}, transfer=12.0, microbatches=24),
    Scenario("a slow network, clocks apart", {"communication:pp": 21.9}, transfer=12.0, microbatches=24, apart=True),
    Scenario("host-bound", idle=0.4),
    Scenario("host-bound, no pipeline", layers=(8,), idle=0.4),
    Scenario("host-bound, pp=2 vpp=2", layers=((2, 2), (2, 2)), idle=0.3),
    Scenario("too few microbatches", {"few_microbatches": 31.9}, microbatches=4),
    Scenario("too few microbatches, pp=8", {"few_microbatches": 34.7}, layers=EIGHT, microbatches=8),
    Scenario("too few microbatches, CPU", {"few_microbatches": 31.6}, microbatches=4, gpu=False),
    Scenario("two slow stages", {"layers:1,2": 11.5}, layers=(4, 6, 6, 4)),
    Scenario("two slow stages, CPU", {"layers:0,3": 13.2}, layers=(6, 4, 4, 6), gpu=False),
    Scenario(
        "more layers, microbatches uneven",
        {"uneven_microbatches": 26.8, "layers:1": 7.2},
        layers=(4, 5, 4, 4),
        uneven=0.9,
    ),
    Scenario("a slow forward", {"slow_forward:1": 15.6}, stretched={(1, "forward", None): 1.8}),
    Scenario(
        "a slow forward, pp=2, CPU",
        {"slow_forward:0": 22.4},
        layers=(4, 4),
        stretched={(0, "forward", None): 2.0},
        gpu=False,
    ),
    Scenario("a slow backward", {"slow_backward:2": 11.3}, stretched={(2, "backward", None): 1.25}),
    Scenario("recomputation on one stage", {"recomputation:2": 20.7}, stretched={(2, "backward", None): 1.5}),
    Scenario(
        "recomputation on the first stage",
        {"recomputation:0": 20.0},
        stretched={(0, "backward", None): 1.5},
        embedding=0.5,
    ),
    Scenario("a slow chunk", {"slow_chunk:1": 18.3}, layers=TWICE, stretched={(1, kind, 1): 1.6 for kind in BOTH}),
    Scenario(
        "a slow chunk, CPU",
        {"slow_chunk:2": 20.2},
        layers=TWICE,
        gpu=False,
        stretched={(2, kind, 0): 1.6 for kind in BOTH},
    ),
    Scenario("uneven microbatches on one stage", {"uneven_microbatches:2": 7.0, "unexplained:2": 2.7}, spread={2: 0.6}),
    Scenario(
        "uneven microbatches on one stage, CPU",
        {"uneven_microbatches:1": 5.0},
        spread={1: 0.6},
        gpu=False,
    ),
    Scenario("a slow link", {"slow_link:1": 13.6}, link={1: 12.0}),
    Scenario("a slow link, CPU", {"slow_link:2": 13.7}, link={2: 12.0}, gpu=False),
    Scenario("a slow link, pp=2, CPU", {"communication:pp": 15.3}, link={0: 12.0}, layers=(4, 4), gpu=False),
    Scenario("late entry", late={2: 300.0}, steps=4, merged=True, gpu=False),
    Scenario("late entry of the first stage", late={0: 200.0}, steps=4, merged=True, gpu=False),
    Scenario("the first microbatch waits for data", {"data_wait:0": 11.4}, data=150.0, steps=3, gpu=False),
    Scenario("the first microbatch waits for data, GPU", {"data_wait:0": 11.4}, data=150.0, steps=3),
    Scenario("a heavy loss, layers not counted", {"embedding_or_loss:3": 22.9}, loss=12.0, counted=False),
    Scenario(
        "a heavy loss, vpp=2, layers not counted",
        {"embedding_or_loss:3": 25.7},
        layers=TWICE,
        loss=12.0,
        counted=False,
        gpu=False,
    ),
    Scenario(
        "a slow rank, three steps, the first one slow",
        {"slow_rank:1": 22.0},
        peers=2,
        slow={1: 1.4},
        steps=3,
        first_step=3.0,
    ),
]
PAIRS = [
    Scenario("layers and loss", {"layers:3": 16.1, "embedding_or_loss:3": 15.4}, layers=(4, 4, 4, 6), loss=10.0),
    Scenario(
        "layers and a slow rank elsewhere",
        {"slow_rank:2": 2.2, "layers:0": 15.7},
        layers=(6, 4, 4, 4),
        peers=2,
        slow={2: 1.3},
    ),
    Scenario(
        "layers and a slow rank, same stage",
        {"slow_rank:1": 26.2, "layers:1": 12.5},
        layers=(4, 6, 4, 4),
        peers=2,
        slow={1: 1.4},
    ),
    Scenario(
        "layers and exposed tp", {"communication:tp": 30.0, "layers:1": 12.0}, layers=(4, 6, 4, 4), exposed={"tp": 0.3}
    ),
    Scenario(
        "loss and exposed ep", {"communication:ep": 30.0, "embedding_or_loss:3": 12.1}, loss=8.0, exposed={"ep": 0.3}
    ),
    Scenario(
        "layers and few microbatches", {"layers:0": 3.3, "few_microbatches": 19.7}, layers=(6, 4, 4, 4), microbatches=6
    ),
    Scenario(
        "uneven microbatches and layers",
        {"uneven_microbatches": 14.4, "layers:2": 15.9},
        layers=(4, 4, 6, 4),
        uneven=0.6,
    ),
    Scenario("exposed tp and ep", {"communication:ep": 20.0, "communication:tp": 20.0}, exposed={"tp": 0.2, "ep": 0.2}),
    Scenario("host-bound and loss", {"embedding_or_loss:3": 14.1}, loss=10.0, idle=0.3),
    # Each replica has such a rank, and fixing one of them alone gains nothing.
    Scenario(
        "slow rank and gradient reduction",
        {"communication:dp": 16.6, "slow_rank:1": 18.5},
        peers=2,
        slow={1: 1.4},
        dp=2,
        tail=300.0,
    ),
]
ALL = [*HEALTHY, *SINGLE, *PAIRS]
#: One with each answer; the others take a minute, and test_diagnose.py asks the same of each clock.
QUICK = {tuple(cause.partition(":")[0] for cause in s.expected): s for s in reversed(ALL)}.values()


def report_of(scenario: Scenario, directory: Path) -> TargetReport:
    write(scenario, directory)
    (target,) = analyze(directory).targets
    return target


def named(target: TargetReport) -> dict[str, float]:
    """What the report names, as ``expected`` spells it, and what that costs, in percent of the step."""
    assert target.diagnosis is not None, target.withheld
    found = {}
    for cause in target.causes:
        where = cause.group or ",".join(map(str, cause.stages)) or cause.stage
        name = cause.kind if where is None else f"{cause.kind}:{where}"
        found[name] = 100 * cause.price.value / target.diagnosis.step_ms
    return found


@pytest.mark.parametrize(
    "scenario", [s if s in QUICK else pytest.param(s, marks=pytest.mark.slow) for s in ALL], ids=lambda s: s.name
)
def test_the_report_names_what_is_wrong_and_what_it_costs(scenario, tmp_path):
    target = report_of(scenario, tmp_path)
    found = named(target)
    assert list(found) == list(scenario.expected)
    assert found == pytest.approx(scenario.expected, abs=1.0)
    # A slow rank has a row of its own below its stage.
    slow = {cause.ranks: cause.stage for cause in target.causes if cause.kind == "slow_rank"}
    assert {row.ranks: row.pp for row in target.slow_ranks} == slow
    for row in target.slow_ranks:
        assert row.compute_ms.mean > target.stages[row.pp].compute_ms.mean

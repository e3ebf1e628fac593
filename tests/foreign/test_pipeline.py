"""Stages told from exchanges that follow each other as Megatron-Core calls them, and none where they do not fit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megaprof.analysis.report.report import analyze
from megaprof.cli import main
from megaprof.foreign.report import Foreign
from tests.analysis.synthetic import kinds
from tests.foreign.test_foreign import SEND_RECV, Job

DESCRIPTION = "PIPELINE_MODEL_PARALLEL_GROUP"


@dataclasses.dataclass
class Rank:
    """What one rank's host calls, one call after the other, as its GPU runs it: a forward takes 2 ms times its stage's
    factor, a backward 4, an exchange 1."""

    job: Job
    ranks: list[int]
    factor: float
    now: float = 0.0

    def passes(self, length: float) -> None:
        length *= self.factor
        self.job.kernel("gemm", self.now + 0.3, length / 2, launch=self.now)
        self.job.kernel("gemm", self.now + 0.3 + length / 2, length / 2, launch=self.now + 0.1)
        self.now += length + 0.5

    def forward_step(self) -> None:
        self.passes(2)

    def backward_step(self) -> None:
        self.passes(4)

    def exchange(self) -> None:
        self.job.kernel(
            SEND_RECV, self.now + 0.1, 1, launch=self.now,
            **{"Process Group Ranks": str(self.ranks), "Process Group Description": DESCRIPTION,
               "Process Group Name": "7", "Collective name": "coalesced"},
        )  # fmt: skip
        self.now += 1.5

    def step(self, stage: int, stages: int, microbatches: int) -> None:
        """`forward_backward_pipelining_without_interleaving` of Megatron-Core, as far as it computes and exchanges."""
        first, last = stage == 0, stage == stages - 1

        def recv_forward() -> None:
            if not first:
                self.exchange()

        def send_forward() -> None:
            if not last:
                self.exchange()

        recv_backward = send_forward_recv_backward = send_forward
        send_backward = send_backward_recv_forward = recv_forward
        warmup = min(stages - stage - 1, microbatches)
        remaining = microbatches - warmup
        for _ in range(warmup):
            recv_forward()
            self.forward_step()
            send_forward()
        if remaining > 0:
            recv_forward()
        for i in range(remaining):
            self.forward_step()
            send_forward_recv_backward()
            self.backward_step()
            if i == remaining - 1:
                send_backward()
            else:
                send_backward_recv_forward()
        for _ in range(warmup):
            recv_backward()
            self.backward_step()
            send_backward()


def write_job(
    directory: Path, stages: int, microbatches: int, *, steps: int = 2, factor: tuple[float, ...] = ()
) -> None:
    """A pipeline of ``stages``, its ranks 2 apart."""
    ranks = [2 * stage for stage in range(stages)]
    for stage, rank in enumerate(ranks):
        job = Job(rank, 2 * stages)
        one = Rank(job, ranks, factor[stage] if factor else 1.0)
        for number in range(steps):
            begin = one.now
            one.step(stage, stages, microbatches)
            job.kernel("adam", one.now + 0.2, 3, launch=one.now + 0.1)
            one.now += 5
            job.event("user_annotation", f"ProfilerStep#{number}", begin - 0.05, one.now - begin - 0.1)
        job.write(directory / f"r{rank}.pt.trace.json")


def foreign(path: Path) -> Foreign:
    report = analyze(path)
    assert report.foreign is not None
    return report.foreign


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [2, 3, 4, 8, 13])
def test_stages_microbatches_and_their_times(tmp_path: Path, stages: int, microbatches: int) -> None:
    slow = stages - 1
    write_job(tmp_path, stages, microbatches, factor=tuple(1.5 if stage == slow else 1 for stage in range(stages)))
    found = foreign(tmp_path)
    assert [(each.stage, each.stages, each.ranks) for each in found.stages] == [
        (stage, stages, (2 * stage,)) for stage in range(stages)
    ]
    assert {(each.microbatches, each.steps) for each in found.stages} == {(microbatches, 2)}
    for each in found.stages:
        factor = 1.5 if each.stage == slow else 1
        if each.microbatch_ms is not None:
            assert each.microbatch_ms == pytest.approx(6 * factor)
        assert each.forward_ms in (None, pytest.approx(2 * factor))
        assert each.backward_ms in (None, pytest.approx(4 * factor))
    last = found.stages[-1]
    assert last.microbatch_ms == pytest.approx(9)
    assert (last.forward_ms, last.backward_ms) == (None, None)
    # Every exchange takes 1 ms in which nothing computes.
    assert last.exchange_ms == pytest.approx(microbatches + 1, abs=0.01)


def test_it_is_shown_and_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_job(tmp_path, 3, 6)
    arguments = ["report", str(tmp_path), "--html", str(tmp_path / "r.html"), "--json", str(tmp_path / "r.json")]
    assert main(arguments) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "stages, from exchanges, not from ranges" in shown
    assert "no layout can be predicted" in shown
    html = (tmp_path / "r.html").read_text()
    assert "from exchanges, not from ranges" in html
    assert "1 of 3" in html
    plain = json.loads((tmp_path / "r.json").read_text())
    assert [each["microbatches"] for each in plain["foreign"]["stages"]] == [6, 6, 6]
    assert plain["targets"] == []


def forward_only(self: Rank, stage: int, stages: int, microbatches: int) -> None:
    for _ in range(microbatches):
        if stage:
            self.exchange()
        self.forward_step()
        if stage < stages - 1:
            self.exchange()


def one_exchange_more(self: Rank, stage: int, stages: int, microbatches: int) -> None:
    step(self, stage, stages, microbatches)
    self.exchange()
    self.exchange()


def computes_elsewhere(self: Rank, stage: int, stages: int, microbatches: int) -> None:
    for _ in range(2 * microbatches + 2 * (stages - stage - 1) + 1):
        self.exchange()
        self.forward_step()


step = Rank.step


@pytest.mark.parametrize("instead", [forward_only, one_exchange_more, computes_elsewhere])
def test_what_does_not_fit_tells_no_stages(
    tmp_path: Path, instead: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rank, "step", instead)
    write_job(tmp_path, 4, 8)
    found = foreign(tmp_path)
    assert found.stages == ()
    assert "no_stages" in kinds(found.warnings)


def test_steps_of_different_sizes_tell_no_stages(tmp_path: Path) -> None:
    write_job(tmp_path, 2, 8)
    other = tmp_path / "other"
    other.mkdir()
    write_job(other, 2, 6)
    (other / "r0.pt.trace.json").rename(tmp_path / "r0.pt.trace.json")
    (other / "r2.pt.trace.json").unlink()
    found = foreign(tmp_path)
    assert found.stages == ()
    assert "no_stages" in kinds(found.warnings)


def test_the_stages_of_each_role_are_its_own(tmp_path: Path) -> None:
    for role, microbatches in (("actor", 8), ("critic", 6)):
        (tmp_path / role).mkdir()
        write_job(tmp_path / role, 2, microbatches)
    found = foreign(tmp_path)
    expected = [("actor", 0, 8), ("actor", 1, 8), ("critic", 0, 6), ("critic", 1, 6)]
    assert [(each.folder, each.stage, each.microbatches) for each in found.stages] == expected


def test_without_pipeline_groups_nothing_is_said_of_them(tmp_path: Path) -> None:
    job = Job()
    job.kernel("gemm", 0, 1)
    job.reduce(2, 1, [0, 1])
    found = foreign(job.write(tmp_path / "a.json"))
    assert found.stages == ()
    assert "no_stages" not in kinds(found.warnings)

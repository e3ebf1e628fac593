"""An in-process restart (nvidia-resiliency-ext) gives a rank another place in a process that has hooks already."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron.core.pipeline_parallel import schedules

from megaprof import ProfileConfig, install_hooks
from megaprof.autoload import arming
from megaprof.capture import profiler
from megaprof.capture.process import process
from megaprof.formats.job import RankStatus
from megaprof.parallel.megatron import coordinates
from megaprof.runtime.armed import armed
from tests.control import places
from tests.parallel.test_megatron import megatron


@pytest.mark.parametrize("way", ["asked again", "installed again", "taken out before"])
def test_the_second_attempt_has_its_own_place_and_nothing_of_the_first(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    untouched = schedules.forward_backward_pipelining_without_interleaving
    config = ProfileConfig(("train_actor",), str(tmp_path), tool=("timeline",))
    monkeypatch.setattr(armed, "config", config)
    monkeypatch.setattr(armed, "awaits_schedule", True)
    ask = arming._asked(lambda: schedules.forward_backward_pipelining_without_interleaving)
    paths = places.Paths.of(tmp_path, None, 4)
    try:
        for rank in (1, 2):  # of the first stage, then of the second
            with megatron(rank, 4, pp=2):
                first = ask() if way == "asked again" else install_hooks(None, config)
                again = ask() if way == "asked again" else install_hooks(None, config)
                (session,) = process.sessions
                assert first is again, "nothing moved"
                assert session.coords == coordinates()[0]
                assert session.timeline is not None
                own = process.listeners[tmp_path / "control"]
                own.look()
            said = places.read(paths.status(rank), RankStatus)
            assert (said.rank, said.coords["pp"], said.ended) == (rank, rank // 2, False)
            if way == "taken out before":
                profiler.leave(session)
        assert places.read(paths.status(1), RankStatus).ended
    finally:
        for session in process.sessions.copy():
            profiler.leave(session)
    assert tmp_path / "control" not in process.listeners
    assert schedules.forward_backward_pipelining_without_interleaving is untouched

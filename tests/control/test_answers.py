"""What ranks make of the request that lies in their control directory, and of what is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaprof.control.listener import Listener
from megaprof.control.request import Requester, new_request
from megaprof.formats.job import Refused
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.control import places
from tests.control.malformed import REFUSED, UNREADABLE

LAYOUT = WorldLayout(ParallelSizes(pp=2))


@pytest.fixture
def leader(tmp_path: Path) -> Listener:
    listener = places.listening(tmp_path, LAYOUT, 0)
    listener.look()
    return listener


@pytest.fixture
def paths(leader: Listener) -> places.Paths:
    return places.Paths(leader.path, 2)


def asked(leader: Listener) -> Requester:
    assert leader.job is not None
    requester = Requester(leader.job, new_request(leader.job.run, "train_actor", timeout=60))
    requester.submit()
    leader.look()
    return requester


@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_is_no_request_is_ignored_and_replaced(kind: str, leader: Listener, paths: places.Paths) -> None:
    assert leader.job is not None
    UNREADABLE[kind](leader.job.run, paths.capture)
    for _ in range(2):
        leader.look()
    assert leader._session.demand is None
    assert paths.says(0) is None
    asked(leader)
    assert leader._session.demand is not None
    assert not (paths.root.parent / "elsewhere").is_symlink()


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_rank_could_do_fails_with_a_reason(kind: str, leader: Listener, paths: places.Paths) -> None:
    write, reason = REFUSED[kind]
    assert leader.job is not None
    write(leader.job.run, paths.capture)
    for _ in range(2):
        leader.look()
    said = paths.says(0)
    assert said is not None
    assert (said.request, said.state) == ("x", "failed")
    assert reason in str(said.reason)


def test_a_directory_in_its_place_keeps_requests_out_and_nothing_else(leader: Listener, paths: places.Paths) -> None:
    (paths.capture / "inside").mkdir(parents=True)
    leader.look()
    with pytest.raises(Refused, match="cannot be written"):
        asked(leader)
    assert not leader.closed
    assert paths.says(0) is None


def test_one_at_a_time(leader: Listener, paths: places.Paths) -> None:
    first = asked(leader)
    with pytest.raises(Refused, match=f"busy with {first.request.id} "):
        asked(leader)
    assert paths.request().id == first.request.id
    first.withdraw()
    leader.look()
    assert leader._session.demand is None
    assert asked(leader).request.id != first.request.id


def test_of_two_that_ask_in_the_same_moment_one_is_told(leader: Listener, paths: places.Paths) -> None:
    early = asked(leader)
    assert leader.job is not None
    late = new_request(leader.job.run, "train_actor")
    places.write(paths.capture, late)  # it did not see the other one either
    leader.look()
    outcome = early.advance()
    assert outcome is not None
    assert str(outcome.reason).startswith(f"busy with {late.id} ")
    assert paths.request().id == late.id, "nobody withdraws what another one asks for"
    said = paths.says(0)
    assert said is not None
    assert (said.request, said.state) == (late.id, "accepted")


def test_whoever_asked_and_died_does_not_keep_others_out(
    leader: Listener, paths: places.Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(leader)
    later = leader._obsolete_at + 1
    monkeypatch.setattr("megaprof.control.listener.time.monotonic", lambda: later)
    leader.look()
    assert not paths.capture.exists()
    leader.look()
    assert leader._session.demand is None


def test_a_request_to_a_killed_job_is_none_to_the_next_one(
    leader: Listener, paths: places.Paths, tmp_path: Path
) -> None:
    dead = asked(leader)
    after = places.listening(tmp_path, LAYOUT, 0)
    after.look()
    assert after._session.demand is None
    assert asked(after).request.id != dead.request.id
    outcome = dead.advance()
    assert outcome is not None
    assert "started again" in str(outcome.reason)

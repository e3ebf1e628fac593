"""Whose an exception is."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from megaprof.runtime.interruption import Suppressed


@pytest.fixture
def handler() -> Iterator[None]:
    def time_out(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("the host's own")

    before = signal.signal(signal.SIGUSR1, time_out)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("handler")
def test_a_time_out_of_the_hosts_is_none_of_our_errors_of_files(tmp_path: Path) -> None:
    with Suppressed(OSError):
        (tmp_path / "none").unlink()
    with pytest.raises(TimeoutError, match="the host's own"), Suppressed(OSError):
        signal.raise_signal(signal.SIGUSR1)
    with pytest.raises(ValueError, match="another"), Suppressed(OSError):
        raise ValueError("another")

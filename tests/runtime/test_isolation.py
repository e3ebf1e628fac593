"""Whose an exception is, and that a fault of ours ends where it happens."""

from __future__ import annotations

import functools
import json
import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megaprof.runtime.isolation import Contained, Suppressed, contained, from_host, in_full, logger


class HostTimeout(TimeoutError):
    pass


def plain(number: int, frame: object) -> None:
    raise HostTimeout


def forgetful(number: int, frame: object) -> None:
    number, frame = 0, None
    raise HostTimeout(number, frame)


def once(number: int, frame: object) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    raise HostTimeout


def by_library(number: int, frame: object) -> None:
    json.loads("{")


class Trainer:
    def stop(self, number: int, frame: object) -> None:
        raise HostTimeout

    def __call__(self, number: int, frame: object) -> None:
        raise HostTimeout


def with_more(more: str, number: int, frame: object) -> None:
    raise HostTimeout


def _raise(fault: BaseException) -> None:
    raise fault


HANDLERS: dict[str, Callable[..., Any]] = {
    "function": plain,
    "rebinds its arguments": forgetful,
    "takes itself out": once,
    "raises in a library": by_library,
    "lambda": lambda *_: _raise(HostTimeout()),
    "method": Trainer().stop,
    "object": Trainer(),
    "partial": functools.partial(with_more, "more"),
}


@pytest.fixture(autouse=True)
def _handler_afterwards() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def our_work(fault: BaseException | None = None) -> None:
    signal.raise_signal(signal.SIGUSR1)
    if fault is not None:
        raise fault


@pytest.mark.parametrize("name", HANDLERS)
def test_what_a_signal_handler_raises_passes_after_the_clean_up(name: str) -> None:
    signal.signal(signal.SIGUSR1, HANDLERS[name])
    cleaned: list[int] = []
    with pytest.raises((HostTimeout, ValueError)) as raised, Contained("working", lambda: cleaned.append(1)):
        our_work()
    assert from_host(raised.value)
    assert cleaned == [1]


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_what_is_no_error_passes_after_the_clean_up(fault: BaseException) -> None:
    cleaned: list[int] = []
    with pytest.raises(type(fault)), Contained("working", lambda: cleaned.append(1)):
        raise fault
    assert cleaned == [1]


def test_a_fault_of_ours_ends_here_also_where_a_handler_is_in(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    with Contained("working", lambda: None):
        our_work(TimeoutError("of ours"))
    assert seen == [signal.SIGUSR1]
    assert "working failed, profiling is off" in caplog.text
    assert "of ours" in caplog.text


def test_what_the_hosts_own_function_raises_when_we_call_it_is_contained() -> None:
    """It would not run without us."""
    with Contained("asking for the iteration", lambda: None):
        _raise(HostTimeout())


def test_a_time_out_of_the_hosts_is_none_of_our_errors_of_files(tmp_path: Path) -> None:
    signal.signal(signal.SIGUSR1, plain)
    with Suppressed(OSError):
        (tmp_path / "none").unlink()
    with pytest.raises(HostTimeout), Suppressed(OSError):
        signal.raise_signal(signal.SIGUSR1)
    with pytest.raises(ValueError, match="another"), Suppressed(OSError):
        raise ValueError("another")


class Broken(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError("the log is full")


@pytest.fixture
def broken_log() -> Iterator[None]:
    handler = Broken()
    logging.getLogger("megaprof").addHandler(handler)
    yield
    logging.getLogger("megaprof").removeHandler(handler)


@pytest.mark.usefixtures("broken_log")
def test_a_log_that_raises_costs_neither_the_clean_up_nor_the_host() -> None:
    cleaned: list[int] = []
    assert contained("working", lambda: cleaned.append(1), ValueError("of ours"))
    assert cleaned == [1]


@pytest.mark.usefixtures("broken_log")
def test_every_room_logs_through_the_guard() -> None:
    """A plain logger of the same name would raise into training."""
    import sys

    import megaprof.autoload.install
    import megaprof.capture.profiler

    assert megaprof.capture.profiler.logger is not logging.getLogger("megaprof")
    rooms = [module for name, module in sys.modules.items() if name.startswith("megaprof.")]
    loggers = [module.logger for module in rooms if hasattr(module, "logger")]
    assert len(loggers) > 5
    for each in loggers:
        each.error("megaprof: nothing happens")


def test_a_clean_up_is_run_in_full_whatever_interrupts_it() -> None:
    signal.signal(signal.SIGUSR1, plain)
    done: list[str] = []

    def interrupted() -> None:
        if not done:
            done.append("began")
            signal.raise_signal(signal.SIGUSR1)
        done.append("ended")

    with pytest.raises(HostTimeout):
        in_full(lambda: 1 / 0, interrupted, lambda: done.append("last"))
    assert done == ["began", "ended", "last"]


def test_what_repeats_is_logged_once_and_not_without_end(caplog: pytest.LogCaptureFixture) -> None:
    for number in range(100):
        logger.once("each is another: %d", number)
    for number in range(3):
        logger.once("of step %d", number, about="steps", level=logging.ERROR)
        logger.once("the same")
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert lines[:-2] == [("WARNING", f"each is another: {number}") for number in range(64)]
    assert lines[-2:] == [("ERROR", "of step 0"), ("WARNING", "the same")]
    assert {record.filename for record in caplog.records} == {Path(__file__).name}

"""Real two-stage jobs in which something goes wrong around megaprof; imported by the ranks' processes."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megaprof import ProfileConfig, install_hooks
from megaprof.testing import BuiltGPT, GPTWorkload, build, cpu_megatron, init_distributed
from tests.built import digests

WORKLOAD = GPTWorkload(pp=2, layers=2, microbatches=3, hidden=32, seq_length=16, heads=2)
STEPS = 4
WINDOWS = 2  # steps 1 and 2 are captured

Numbers = tuple[list[list[float]], str, str]


def config(directory: Path, **fields: Any) -> ProfileConfig:
    defaults = {"target": ("train_actor",), "dir": str(directory), "select": "per-stage", "flush_seconds": 20}
    return ProfileConfig(**{**defaults, **({} if "steps" in fields else {"steps": "1:3"}), **fields})


def numbers(gpt: BuiltGPT, during: Callable[[int], None] = lambda step: None) -> Numbers:
    """Train, and return everything that a fault could have changed."""
    losses = []
    for step in range(STEPS):
        during(step)
        losses.append(gpt.train_step())
    return losses, *digests(gpt)


class Lines(logging.Handler):
    """megaprof's own error lines."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def small_disk(mebibytes: float, directory: Path) -> Iterator[None]:
    """A file system of that size at ``directory``: a tmpfs, which needs root."""
    directory.mkdir(parents=True, exist_ok=True)
    size = f"size={int(mebibytes * 1024)}k"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "megaprof-test", str(directory)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=False)


@contextlib.contextmanager
def _no_rename(fault: BaseException) -> Iterator[None]:
    with mock.patch.object(os, "link", _raise(fault)), mock.patch.object(os, "replace", _raise(fault)):
        yield


def _raise(error: BaseException) -> Callable[..., Any]:
    def raising(*args: Any, **kwargs: Any) -> Any:
        raise error

    return raising


def _backwards() -> Callable[[], float]:
    ticks = iter(range(10**9, 0, -1))
    return lambda: float(next(ticks))


def scenarios(directory: Path) -> dict[str, tuple[ProfileConfig, Any, Callable[[int], None]]]:
    """Name to (configuration, context that is open around install and training, what happens before each step)."""
    from torch.profiler import profile

    nothing: Callable[[int], None] = lambda step: None  # noqa: E731
    fine = contextlib.nullcontext

    def remove_directory(place: Path) -> Callable[[int], None]:
        def remove(step: int) -> None:
            if step == 2:
                shutil.rmtree(place, ignore_errors=True)

        return remove

    def at(name: str) -> Path:
        return directory / name

    in_the_way = at("in the way")
    in_the_way.touch()
    no_space = OSError(28, "No space left on device")
    found = {
        "save directory unwritable": (config(in_the_way / "traces"), fine(), nothing),
        "save directory removed": (config(at("removed")), fine(), remove_directory(at("removed"))),
        "kineto does not start": (
            config(at("start")),
            mock.patch.object(profile, "start_trace", _raise(RuntimeError("kineto is unwell"))),
            nothing,
        ),
        "export raises": (
            config(at("export")),
            mock.patch.object(profile, "export_chrome_trace", _raise(RuntimeError("export is unwell"))),
            nothing,
        ),
        "no space for the rename": (config(at("rename")), _no_rename(no_space), nothing),
        "clock going backwards": (config(at("clock")), mock.patch.object(time, "time", _backwards()), nothing),
        "second profiler": (config(at("second")), SecondProfiler(), nothing),
        "role leaves the directory": (config(at("role")), fine(), nothing),
        "host memory limit": (config(at("memory"), max_host_memory="1MiB", steps="1"), fine(), nothing),
    }
    return found


class SecondProfiler:
    """Somebody else's profiler, started after the hooks went in and active while our windows are due."""

    def __enter__(self) -> None:
        self._theirs = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def start(self) -> None:
        self._theirs.start()

    def __exit__(self, *_: object) -> None:
        self._theirs.stop()


ROLES = {"role leaves the directory": "../../x" + "ä" * 300}


def every_fault(directory: Path) -> dict[str, Any]:
    """In one job: train once undisturbed, then once per fault, always from the same seed."""
    rank, _ = init_distributed()
    lines = Lines()
    logging.getLogger("megaprof").addHandler(lines)
    results: dict[str, Any] = {}
    with cpu_megatron():
        results["undisturbed"] = (numbers(build(WORKLOAD)), [], False)
        for name, (options, context, during) in scenarios(directory / f"rank{rank}").items():
            lines.lines = []
            gpt = build(WORKLOAD)
            with context:
                handle = install_hooks(gpt.chunks, options, role=ROLES.get(name))
                if isinstance(context, SecondProfiler):
                    context.start()
                outcome = numbers(gpt, during)
                active = handle.active
                handle.remove()
            results[name] = (outcome, lines.lines, active)
    return results


def full_disk(directory: Path, mebibytes: float) -> Any:
    """Both ranks write to a file system that is too small for their traces."""
    rank, _ = init_distributed()
    lines = Lines()
    logging.getLogger("megaprof").addHandler(lines)
    mine = directory / f"disk{rank}"
    with cpu_megatron():
        undisturbed = numbers(build(WORKLOAD))
        gpt = build(WORKLOAD)
        with small_disk(mebibytes, mine):
            with install_hooks(gpt.chunks, config(mine)):
                disturbed = numbers(gpt)
            contents = {path.name: path.read_bytes() for path in mine.iterdir()}
    return undisturbed, disturbed, lines.lines, contents


def dies_while_others_write(directory: Path) -> None:
    """Rank 0 is killed in the middle of the captured step's successor; rank 1 has files to finish."""
    rank, _ = init_distributed()
    with cpu_megatron():
        gpt = build(WORKLOAD)
        install_hooks(gpt.chunks, config(directory, steps="1"))

        def die(step: int) -> None:
            if step == 2 and rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        numbers(gpt, die)


def interrupted(directory: Path) -> str:
    """Ctrl-C on the last stage, in the second captured step's forward: what the host then sees on either rank."""
    rank, _ = init_distributed()
    with cpu_megatron():
        gpt = build(WORKLOAD)
        handle = install_hooks(gpt.chunks, config(directory))
        original = gpt.forward_step

        def forward_step(iterator: Any, model: Any) -> Any:
            if gpt.step == 2 and rank == 1:
                raise KeyboardInterrupt
            return original(iterator, model)

        gpt.forward_step = forward_step  # type: ignore[method-assign]
        try:
            numbers(gpt)
        except (KeyboardInterrupt, RuntimeError) as error:
            handle.remove()
            return type(error).__name__
    return "nothing"

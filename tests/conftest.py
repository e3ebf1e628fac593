"""A one-rank world of real megatron-core in this process, for tests that need no second rank."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import warm_ranks

# A machine that is busy with other work is no reason for a test to fail.
settings.register_profile("megaprof", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("megaprof")

# Before torch is imported: Kineto's own log lines on stderr are not what is tested.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
# Megatron-Core compiles nothing on a CPU, and imports a third faster where nothing could be.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# Ranks share a few cores: threads that wait for work by spinning take them from each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell without job control starts what runs in the background with SIGINT ignored; children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection() -> None:
    """What is imported stays: the collector would look through all of it again and again, here and in every test."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_ambient_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("MEGAPROF_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _nothing_was_logged_once() -> None:
    from megaprof.runtime.isolation import logger

    logger.said.clear()


@pytest.fixture(autouse=True)
def _nothing_stays_in_the_background() -> Iterator[None]:
    """A task that a test leaves behind would fail a later one, and name that."""
    yield
    module = sys.modules.get("megaprof.capture.process")
    if module is not None:
        assert list(module.process.background._tasks) == []


@pytest.fixture(autouse=True)
def _no_remote_files() -> Iterator[None]:
    """What a test wrote to fsspec's ``memory://``, which the process has once, is gone behind it."""
    yield
    memory = sys.modules.get("fsspec.implementations.memory")
    if memory is not None:
        memory.MemoryFileSystem.store.clear()
        memory.MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(autouse=True, scope="session")
def _ranks_begin_at_once() -> Iterator[None]:
    from megaprof.testing import launcher

    with warm_ranks.Server(launcher.start) as server, pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux":
            patch.setattr(launcher, "start", server.start)
        yield


@pytest.fixture
def fresh_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank is a fresh interpreter."""
    monkeypatch.setattr(warm_ranks.Server, "fits", lambda *_: False)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A built GPT on one rank, no pipelining; everything is undone behind the module."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megaprof.testing import GPTWorkload, build, cpu_megatron

    store: Path = tmp_path_factory.mktemp("rendezvous") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        with cpu_megatron():
            yield build(GPTWorkload(layers=2, microbatches=3, hidden=32, seq_length=16, heads=2))
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()

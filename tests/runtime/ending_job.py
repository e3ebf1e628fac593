"""A training job that ends, or splits, in the way that its first argument names. Run by test_ending.py."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from isal import igzip

from megaprof import ProfileConfig, install_hooks
from megaprof.autoload.install import Handle
from megaprof.capture.process import process
from megaprof.testing import BuiltGPT, GPTWorkload, build, cpu_megatron
from megaprof.testing.cpu import OnCpu
from megaprof.testing.faults import before_forward

WORKLOAD = GPTWorkload(layers=1, microbatches=2, hidden=32, seq_length=16, heads=2)


def install(gpt: BuiltGPT, directory: str, **fields: Any) -> Handle:
    return install_hooks(gpt.chunks, ProfileConfig(**{"target": ("train_actor",), "dir": directory, **fields}))


def ready(seen: Sequence[int] = ()) -> None:
    """The test sends its signal now, which may be noted in ``seen``."""
    print("ready", flush=True)
    wait(seen)


def wait(seen: Sequence[int] = ()) -> None:
    """For the signal. One that arrives just before a sleep begins does not end that sleep, so sleeps are short."""
    for _ in range(3000):
        if seen:
            return
        time.sleep(0.1)


def returns(gpt: BuiltGPT, directory: str) -> None:
    install(gpt, directory, schedule="0")
    gpt.train_step()


def raises(gpt: BuiltGPT, directory: str) -> None:
    install(gpt, directory, target=("train_overall",), schedule="0")
    gpt.train_step()
    raise RuntimeError("of the host")


def changes_threads(gpt: BuiltGPT, directory: str) -> None:
    install(gpt, directory, target=("train_overall",), schedule="0:0:0:1:0")

    def step() -> None:
        with OnCpu():
            gpt.train_step()

    first, second = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    for pool in (first, second, first):
        pool.submit(step).result()
    first.shutdown()
    second.submit(step).result()


def leaves_at_once(gpt: BuiltGPT, directory: str) -> None:
    install(gpt, directory, schedule="0")
    gpt.train_step()
    os._exit(3)


def waits_in_a_window(gpt: BuiltGPT, directory: str) -> None:
    install(gpt, directory, schedule="1")
    gpt.train_step()
    before_forward(gpt.chunks[0], ready)
    gpt.train_step()


def waits_in_a_write(gpt: BuiltGPT, directory: str, seconds: float = 1.0) -> None:
    """Half of a file is written when the signal comes; the other half within a second of it."""
    write = igzip.IGzipFile.write

    def slowly(file: Any, data: bytes) -> int:
        igzip.IGzipFile.write = write
        write(file, data[:100])
        file.flush()
        print("ready", flush=True)
        time.sleep(seconds)
        write(file, data[100:])
        return len(data)

    igzip.IGzipFile.write = slowly
    install(gpt, directory, schedule="0")
    gpt.train_step()
    wait()


def is_long_in_a_write(gpt: BuiltGPT, directory: str) -> None:
    waits_in_a_write(gpt, directory, seconds=200)


def waits_when_all_is_done(gpt: BuiltGPT, directory: str) -> None:
    handle = install(gpt, directory, schedule="0")
    gpt.train_step()
    handle.flush()
    gpt.train_step()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ready()


def has_its_own_handler(gpt: BuiltGPT, directory: str) -> None:
    """As Megatron-LM's --exit-signal-handler: note the signal, finish the step, leave. It makes one step more."""
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    install(gpt, directory, schedule="0:0:0:2")
    before_forward(gpt.chunks[0], lambda: seen or ready(seen))
    while not seen:
        gpt.train_step()
    gpt.train_step()
    sys.exit(5)


def has_its_own_handler_in_a_backward(gpt: BuiltGPT, directory: str) -> None:
    """The signal comes while autograd runs a hook of the host's."""
    seen: list[int] = []

    def hook(gradient: torch.Tensor) -> None:
        if not seen:
            ready(seen)

    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    next(gpt.chunks[0].parameters()).register_hook(hook)
    install(gpt, directory, schedule="0:0:0:2")
    gpt.train_step()
    gpt.train_step()
    sys.exit(5)


def has_a_handler_that_ends_it(gpt: BuiltGPT, directory: str) -> None:
    """As Megatron-LM's --otel-enabled: do something, then what was there before, here the default action. It goes in
    before the hooks do."""
    before = signal.getsignal(signal.SIGTERM)

    def end(number: int, frame: Any) -> None:
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)
    waits_in_a_window(gpt, directory)


def calls_the_handler_before_it(gpt: BuiltGPT, directory: str) -> None:
    """A host that puts its handler in late and, being polite, calls what was there before."""

    def late() -> None:
        before = signal.getsignal(signal.SIGTERM)
        assert callable(before), "megaprof's handler is in while its window is open"

        def leave(number: int, frame: Any) -> None:
            before(number, frame)
            sys.exit(41)

        signal.signal(signal.SIGTERM, leave)
        ready()

    install(gpt, directory, schedule="0")
    before_forward(gpt.chunks[0], late)
    gpt.train_step()


def interrupted_while_a_window_opens(gpt: BuiltGPT, directory: str) -> None:
    """Ctrl-C at the moment at which Kineto has started; the host goes on."""
    profile = torch.profiler.profile
    start = profile.start_trace

    def interrupted(self: Any) -> None:
        start(self)
        raise KeyboardInterrupt

    profile.start_trace = interrupted  # type: ignore[method-assign]
    install(gpt, directory, schedule="0")
    try:
        gpt.train_step()
    except KeyboardInterrupt:
        print("the host's own")
    profile.start_trace = start  # type: ignore[method-assign]
    print("recording", torch._C._autograd._profiler_enabled())
    gpt.train_step()


def removes_from_another_thread(gpt: BuiltGPT, directory: str) -> None:
    handle = install(gpt, directory, schedule="0", ranges="module")
    threads: list[threading.Thread] = []

    def remove() -> None:
        if not threads:
            threads.append(threading.Thread(target=handle.remove))
            threads[0].start()
            threads[0].join(60)
            print("asked", handle.active)

    before_forward(gpt.chunks[0], remove)
    gpt.train_step()
    print("removed", not handle.active, torch._C._autograd._profiler_enabled())
    gpt.train_step()


def removes_from_another_thread_between_calls(gpt: BuiltGPT, directory: str) -> None:
    """A window of all roles outlives its call; no call follows, so the end of the process closes it."""
    handle = install(gpt, directory, target=("train_overall",), schedule="0")
    gpt.train_step()
    other = threading.Thread(target=handle.remove)
    other.start()
    other.join(60)
    print("asked", handle.active)


def forks(gpt: BuiltGPT, directory: str) -> None:
    """Inside a window, as a DataLoader does whose first batch is asked for in a step; and after it."""
    children: list[int] = []

    def fork() -> None:
        if children:
            return
        with handle._session.writer._idle, process.background._lock:  # the worst moment: threads of ours hold them
            child = os.fork()
        if child:
            children.append(child)
            return
        assert not process.background._tasks
        process.background.remove(fork)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert not handle.active
        assert process.started is None, "the child may start hooks of its own"
        assert handle.flush(0)
        torch.ones(2).sum()
        atexit._run_exitfuncs()
        os._exit(7)  # as multiprocessing does: torch itself hangs in a child that leaves a window by sys.exit

    process.started = handle = install(gpt, directory, schedule="0")
    before_forward(gpt.chunks[0], fork)
    gpt.train_step()
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 7
    loader = torch.utils.data.DataLoader(list(range(8)), num_workers=2, multiprocessing_context="fork")
    assert sum(int(batch) for batch in loader) == 28


def job(what: str, directory: str) -> None:
    if what == "forked":  # a rank that multiprocessing forked: it leaves by os._exit, past atexit
        rank = multiprocessing.get_context("fork").Process(target=job, args=("returns", directory))
        rank.start()
        rank.join(120)
        sys.exit(rank.exitcode)
    torch.set_num_threads(1)
    store = Path(f"{directory}.store")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    with cpu_megatron():
        globals()[what](build(WORKLOAD), directory)

"""What bounds a window. Host memory: reading sizes, control groups of both versions, and closing a window in a real
step. The device: waiting with a limit, where only `torch.cuda`'s answers are made up."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megaprof import ProfileConfig, install_hooks
from megaprof.capture import bounds as guarding
from megaprof.capture import this_rank
from megaprof.capture.bounds import CLOSING_FACTOR, Guard, capturing
from megaprof.capture.process import process
from megaprof.capture.this_rank import ThisRank
from megaprof.config.values import DEFAULT_SHARE, parse_limit
from megaprof.formats.timeline import SUFFIX as TIMELINE_SUFFIX
from megaprof.formats.timeline import read_timeline
from megaprof.parallel.machine import find_bounds, resident_bytes
from megaprof.parallel.topology import ParallelSizes, WorldLayout

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("64GiB", (64 * GIB, DEFAULT_SHARE)),
        ("64g", (64 * GIB, DEFAULT_SHARE)),
        ("64 GB", (64 * 10**9, DEFAULT_SHARE)),
        ("1.5TiB", (3 << 39, DEFAULT_SHARE)),
        ("1000000B", (1000000, DEFAULT_SHARE)),
        ("80%", (None, 0.8)),
        (" 100 % ", (None, 1.0)),
    ],
)
def test_limits(text: str, limit: tuple[int | None, float]) -> None:
    assert parse_limit("--x", text) == limit


@pytest.mark.parametrize("text", ["", "lots", "-1GiB", "0%", "101%", "0", "12", "64XB", "GiB", "1e3", "80%%"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--x: .* valid: a size such as 64GiB"):
        parse_limit("--x", text)


@given(st.text(max_size=12))
def test_reading_a_limit_fails_with_a_value_error_only(text: str) -> None:
    with contextlib.suppress(ValueError):
        size, share = parse_limit("--x", text)
        assert size is None or size > 0
        assert 0 < share <= 1


def proc(directory: Path, cgroup: str, mounts: str) -> Path:
    (directory / "proc/self").mkdir(parents=True)
    (directory / "proc/meminfo").write_text("MemTotal:  1048576 kB\nMemFree: 1 kB\nMemAvailable:  262144 kB\n")
    (directory / "proc/self/cgroup").write_text(cgroup)
    (directory / "proc/self/mountinfo").write_text(mounts)
    return directory / "proc"


def group(path: Path, **files: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)


def read(bounds: dict[str, Callable[[], tuple[int, int]]]) -> list[tuple[int, int]]:
    return [read() for read in bounds.values()]


def test_control_groups_of_version_2(tmp_path: Path) -> None:
    """Own group without a limit, its parent with one (a Kubernetes pod); page cache does not count as used."""
    mount = tmp_path / "cgroup"
    group(mount)
    stat = "anon 1000\ninactive_file 300\nactive_file 200\n"
    group(mount / "pod", memory__current="5000\n", memory__max="9000\n", memory__stat=stat)
    group(mount / "pod/container", memory__current="4000\n", memory__max="max\n", memory__stat=stat)
    found = find_bounds(proc(tmp_path, "0::/pod/container\n", f"30 23 0:26 / {mount} rw - cgroup2 cgroup2 rw\n"))
    assert read(found) == [(768 << 20, 1 << 30), (4500, 9000)]
    assert "pod" in list(found)[1]


def test_control_groups_of_version_1_without_a_namespace(tmp_path: Path) -> None:
    """A container sees its own group mounted, under the path that it has on the host."""
    mount = tmp_path / "memory"
    stat = "cache 7\ntotal_inactive_file 300\ntotal_active_file 200\ninactive_file 1\n"
    group(mount, memory__usage_in_bytes="5000\n", memory__limit_in_bytes="9000\n", memory__stat=stat)
    text = "9:cpu:/docker/abc\n4:hugetlb,memory:/docker/abc\n0::/\n"
    mounts = (
        f"35 31 0:32 /docker/abc {tmp_path / 'cpu'} rw,relatime - cgroup cgroup rw,cpu\n"
        f"36 31 0:33 /docker/abc {mount} rw,relatime - cgroup cgroup rw,memory\n"
    )
    assert read(find_bounds(proc(tmp_path, text, mounts))) == [(768 << 20, 1 << 30), (4500, 9000)]


@pytest.mark.parametrize("unlimited", ["9223372036854771712", "max", str(1 << 30)])
def test_a_group_without_a_limit_leaves_the_machine(tmp_path: Path, unlimited: str) -> None:
    mount = tmp_path / "memory"
    group(mount / "mine", memory__usage_in_bytes="5", memory__limit_in_bytes=unlimited, memory__stat="")
    mounts = f"35 31 0:32 / {mount} rw,relatime - cgroup cgroup rw,memory\n"
    assert read(find_bounds(proc(tmp_path, "4:memory:/mine\n", mounts))) == [(768 << 20, 1 << 30)]


def test_this_machine_can_be_read() -> None:
    assert 0 < resident_bytes() < 1 << 50
    for used, there_is in read(find_bounds()):
        assert 0 < used < there_is


class Watched:
    """A guard over numbers that the test sets, and what it said."""

    def __init__(self, limit: tuple[int | None, float], monkeypatch: pytest.MonkeyPatch, others: int = 0) -> None:
        self.resident, self.used, self.looks = 100, 100, threading.Semaphore(0)
        self.reasons: list[str] = []
        self.said = threading.Event()
        self.guard, self._arguments = Guard(), (limit, others, self._say)
        monkeypatch.setattr(guarding, "resident_bytes", lambda: self.resident)
        monkeypatch.setattr(guarding, "find_bounds", lambda: {"the container": self._read})
        monkeypatch.setattr(guarding, "INTERVAL_SECONDS", 0.001)

    def start(self) -> None:
        self.guard.start(*self._arguments)

    def _read(self) -> tuple[int, int]:
        self.looks.release()
        return self.used, 1000

    def _say(self, reason: str) -> None:
        self.reasons.append(reason)
        self.said.set()


def watchers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "megaprof-window"]


@pytest.mark.parametrize(
    ("limit", "change", "said"),
    [
        ((None, 0.8), {"used": 801}, "the container"),
        ((500, 0.95), {"resident": 501}, "this process"),
        # 60 more in the window, and closing it may take seven times that; so may each other rank of the host.
        ((500, 0.95), {"resident": 160}, "this process"),
        ((None, 0.8), {"used": 460, "resident": 160}, "the container"),
        ((None, 0.8), {"others": 3, "used": 140, "resident": 125}, "the container"),
    ],
)
def test_a_bound_is_reported_once(
    limit: tuple[int | None, float], change: dict[str, int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(limit, monkeypatch, change.get("others", 0))
    watched.start()
    for _ in range(3):
        assert watched.looks.acquire(timeout=30)
    assert watched.reasons == []
    vars(watched).update(change)
    assert watched.said.wait(30)
    watched.guard.end()
    for thread in watchers():
        thread.join(30)
    (reason,) = watched.reasons
    assert reason.startswith(f"host memory: {said} uses")
    assert "--profile-max-host-memory allows" in reason


@pytest.mark.parametrize(
    ("local", "select", "options", "others"),
    [
        ("8", "0", {}, 0),
        ("8", "0,2,5,8", {}, 2),
        ("8", "0", {"on_demand": True}, 7),
        ("9" * 23, "0", {"on_demand": True}, 15),  # a launcher's mistake: the job has 16 ranks
        ("", "0,1", {}, 0),
    ],
)
def test_neighbours_are_ranks_of_this_host_that_capture(
    local: str, select: str, options: dict[str, Any], others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    layout = WorldLayout(ParallelSizes(dp=16))
    monkeypatch.setattr(this_rank, "_place", lambda *_, **__: (layout.coords(0), layout))
    config = ProfileConfig(("train_actor",), "/t", select=select, **options)
    assert ThisRank.of(config, None, None, pipeline=False).neighbours == others


def test_the_thread_lives_while_it_watches_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched((None, 0.8), monkeypatch)
    for earlier in watchers():  # nobody waits for the thread of a window that has just closed
        earlier.join(30)
    assert watchers() == []
    watched.start()
    (thread,) = watchers()
    watched.guard.end()
    thread.join(30)
    assert watchers() == []
    watched.used = 999
    assert watched.reasons == []


def test_what_cannot_be_read_is_not_watched(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def bounds() -> Any:
        raise OSError("no /proc here")

    said: list[str] = []
    monkeypatch.setattr(guarding, "find_bounds", bounds)
    guard = Guard()
    guard.start((None, 0.8), 0, said.append)
    guard.end()
    for thread in watchers():
        thread.join(30)
    assert said == []
    assert "host memory cannot be watched" in caplog.text


def metadata(directory: Path, step: int = 0) -> dict[str, Any]:
    (path,) = directory.glob(f"*.step{step:06d}.*.pt.trace.json.gz")
    with gzip.open(path) as file:
        loaded = json.load(file)
    found: dict[str, Any] = loaded["megaprof"]
    found["microbatches written"] = sorted(
        e["name"] for e in loaded["traceEvents"] if str(e.get("name")).startswith("megaprof/forward")
    )
    return found


def ran_out(reason: str) -> None:
    """What the guard's thread does."""
    assert process.window is not None
    process.memory_ran_out(process.window.owner, reason)


@pytest.mark.parametrize(("target", "ranges"), [("train_actor", "module"), ("train_overall", "step")])
def test_the_window_closes_before_the_next_microbatch_and_training_goes_on(
    target: str, ranges: str, one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward_step, microbatches = one_rank.forward_step, []

    def running_full(*args: Any) -> Any:
        microbatches.append(args)
        if len(microbatches) == 2:
            ran_out("host memory: the test says so")
        return forward_step(*args)

    monkeypatch.setattr(one_rank, "forward_step", running_full)
    config = ProfileConfig(
        target=(target,), dir=str(tmp_path), steps="0,2", ranges=ranges, tool=("torch", "timeline"), activities=("cpu",)
    )
    with install_hooks(one_rank.chunks, config) as handle:
        one_rank.train_step()
        assert process.window is None
        assert not process.asked
        assert watchers() == []
        for _ in range(3):
            one_rank.train_step()
        assert handle.active
    assert len(microbatches) == 4 * one_rank.workload.microbatches
    (timeline,) = tmp_path.glob("*" + TIMELINE_SUFFIX)
    steps = read_timeline(timeline)
    assert steps.steps["step"].tolist() == [0, 1, 2, 3]
    assert len({steps.times([n])[1].shape for n in range(4)}) == 1, "the step whose window closed early is whole"
    assert metadata(tmp_path, 2)["truncated"] is False
    found = metadata(tmp_path)
    assert (found["truncated"], found["truncated_reason"]) == (True, "host memory: the test says so")
    written = [f"megaprof/forward mb={n} chunk=0" for n in range(2)] if ranges == "module" else []
    assert found["microbatches written"] == written


def test_nothing_opens_when_memory_ran_out_between_two_calls(one_rank: Any, tmp_path: Path) -> None:
    config = ProfileConfig(target=("train_overall",), dir=str(tmp_path), schedule="0:0:0:1:0")
    with install_hooks(one_rank.chunks, config) as handle:
        one_rank.train_step()
        ran_out("host memory: used up by a rollout")
        one_rank.log_probs_pass()
        assert process.window is None
        assert handle.active
    assert metadata(tmp_path)["truncated_reason"] == "host memory: used up by a rollout"


def test_a_window_that_is_watched_costs_one_thread_while_it_is_open(
    one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward_step, seen = one_rank.forward_step, []

    def counting(*args: Any) -> Any:
        seen.append(len(watchers()))
        return forward_step(*args)

    monkeypatch.setattr(one_rank, "forward_step", counting)
    with install_hooks(one_rank.chunks, ProfileConfig(target=("train_actor",), dir=str(tmp_path), steps="0")):
        one_rank.train_step()
        one_rank.train_step()
    assert seen == [1, 1, 1, 0, 0, 0]


def train_until_full(directory: str) -> dict[str, Any]:
    """One rank whose window needs more memory than the limit, set a little above what the process has, allows."""
    from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed

    init_distributed()
    hoard = []
    with cpu_megatron():
        gpt = build(GPTWorkload(layers=2, microbatches=8, hidden=32, seq_length=16, heads=2))
        losses = [gpt.train_step()]
        forward_step = gpt.forward_step

        def hoarding(*args: Any) -> Any:
            hoard.append(bytearray(os.urandom(1 << 20)) * 16)
            deadline = threading.Event()
            deadline.wait(0.3)  # the guard looks every 0.1 s
            return forward_step(*args)

        gpt.forward_step = hoarding  # type: ignore[method-assign]
        config = ProfileConfig(
            target=("train_actor",),
            dir=directory,
            steps="0",
            max_host_memory=f"{resident_bytes() + (CLOSING_FACTOR + 1) * (40 << 20)}B",
        )
        with install_hooks(gpt.chunks, config) as handle:
            losses.append(gpt.train_step())
            active = handle.active
        gpt.forward_step = forward_step  # type: ignore[method-assign]
        losses.append(gpt.train_step())
    return {"active": active, "losses": len(losses), "hoarded": len(hoard)}


@pytest.mark.slow
def test_a_real_process_that_grows_past_its_limit(tmp_path: Path) -> None:
    from megaprof.testing import run_ranks

    (rank,) = run_ranks(train_until_full, 1, str(tmp_path), timeout=120)
    assert rank == {"active": True, "losses": 3, "hoarded": 8}
    found = metadata(tmp_path)
    assert found["truncated"]
    assert found["truncated_reason"].startswith("host memory: this process uses")
    assert 0 < len(found["microbatches written"]) < 8


CHILD = """
import sys, threading
from megaprof.capture import bounds as guarding
from megaprof.parallel.machine import find_bounds
said = threading.Event()
say = lambda reason: (print(reason), said.set())
guarding.INTERVAL_SECONDS = 0.01
print([read()[1] for name, read in find_bounds().items() if sys.argv[1] in name])
guarding.Guard().start((None, 0.5), 0, say)
print(said.wait(0.5))
hoard = b"x" * (200 << 20)
print(said.wait(60))
"""


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A real control group with 300 MiB, below this process's own."""
    name = f"megaprof-test-{os.getpid()}"
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    root = Path("/sys/fs/cgroup") if unified else Path("/sys/fs/cgroup/memory")
    path = root / own.get("" if unified else "memory", "/").lstrip("/") / name
    try:
        path.mkdir()
        (path / ("memory.max" if unified else "memory.limit_in_bytes")).write_text(str(300 << 20))
    except OSError as fault:
        with contextlib.suppress(OSError):
            path.rmdir()
        pytest.skip(f"control groups cannot be made here: {fault}")
    yield path
    path.rmdir()


def test_a_real_control_group(limited_group: Path) -> None:
    command = f"echo $$ > {limited_group}/cgroup.procs && exec {sys.executable} -c '{CHILD}' {limited_group.name}"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    limits, before, reason, after = done.stdout.splitlines()
    assert (limits, before, after) == (str([300 << 20]), "False", "True")
    assert reason.startswith("host memory: the container (")


class Device:
    """What `torch.cuda` says, and what it was asked to wait for."""

    def __init__(self) -> None:
        self.idle = threading.Event()
        self.captures = False
        self.waited_for: list[int] = []

    def synchronize(self, device: int) -> None:
        self.waited_for.append(device)
        self.idle.wait()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made_up = Device()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "synchronize", made_up.synchronize)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made_up.captures)
    yield made_up
    made_up.idle.set()


def guard() -> Guard:
    made = Guard()
    made.start((None, 1.0), 0, pytest.fail)
    return made


def gone(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(60)
    return not any(thread.is_alive() for thread in threads)


def test_an_idle_device_is_waited_for_once(device: Device) -> None:
    device.idle.set()
    wait = guard()
    assert device.waited_for == []
    assert wait.wait(60) is None
    assert wait.wait(0) is None
    assert device.waited_for == [3], "the device of the thread that asks, which need not be the first one"


@pytest.mark.parametrize(("seconds", "ending"), [(0.0, lambda: False), (0.3, lambda: False)])
def test_a_busy_device_is_left_alone_when_time_is_up(
    device: Device, seconds: float, ending: Callable[[], bool]
) -> None:
    assert "did not finish" in str(guard().wait(seconds, ending))


def test_who_has_to_end_waits_no_longer(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaprof.capture.bounds.GRACE_SECONDS", 0.2)
    assert "did not finish" in str(guard().wait(3600, lambda: True))


def test_a_device_that_becomes_idle_in_time_is_idle(device: Device) -> None:
    threading.Timer(0.2, device.idle.set).start()
    assert guard().wait(3600) is None


def test_a_broken_device_is_not_busy(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(number: int) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert guard().wait(3600) is None


def test_nothing_waits_while_a_graph_is_captured(device: Device) -> None:
    device.captures = True
    assert capturing()
    assert "CUDA graph" in str(guard().wait(3600))
    assert device.waited_for == []


def test_a_thread_that_is_not_asked_ends_without_waiting(device: Device) -> None:
    wait = guard()
    threads = watchers()
    assert threads
    wait.end()
    assert gone(threads[-1:])
    assert device.waited_for == []


def test_a_process_without_cuda_has_no_device() -> None:
    made = guard()
    threads = watchers()
    assert made.wait(0) is None
    assert not capturing()
    assert gone(threads[-1:])
    assert not torch.cuda.is_initialized()

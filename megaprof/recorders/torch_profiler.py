"""Records one Kineto trace per window with the torch profiler, and has the files made that derive from it."""

from __future__ import annotations

import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from megaprof.artifacts.writer import Writer
from megaprof.config.options import ProfileConfig, flag
from megaprof.formats import ranges
from megaprof.formats.metadata import Profiler
from megaprof.formats.names import DEVICE_STACKS_SUFFIX, KERNELS_SUFFIX, STACKS_SUFFIX, TRACE_SUFFIX, kineto_temporary
from megaprof.formats.ranges import GARBAGE, PREFIX
from megaprof.formats.timeline import Waited
from megaprof.recorders import Window, emit
from megaprof.recorders.emit import LoggedRange, graph_naming
from megaprof.recorders.loop import Collections, measure_waits
from megaprof.runtime.isolation import Suppressed, logger
from megaprof.runtime.patching import Patches

#: The module in which torch looks up the functions that prepare and enable Kineto. It is not public.
_TORCH: Any = torch.autograd.profiler
_KERNEL = b'"cat": "kernel"'
_PIECE = 1 << 20
_ACTIVITIES = {"cpu": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA}
#: The most windows whose derived files may wait for their turn. Each keeps a raw trace on disk, and nothing in memory.
_QUEUE = 8
#: The fields of the trace's metadata that the kernel summary repeats.
_IDENTITY = ("target", "role", "steps", "coords", "host", "pid", "truncated", "truncated_reason")


class TorchRecorder:
    """Starts Kineto when a window opens. Exports on the training thread; the writer's thread compresses the trace.

    Raises ValueError if this process cannot record: only CUDA activity is wanted and there is no CUDA device, or
    another torch profiler is already running (Kineto holds one session).
    """

    def __init__(self, config: ProfileConfig, writer: Writer) -> None:
        if not _recordable(config):
            raise ValueError(
                f"{flag('activities')} cuda: there is no CUDA device here, or this process does not use it yet; add "
                "cpu, or install the hooks where and when the model is on its GPU"
            )
        if torch._C._autograd._profiler_enabled():
            raise ValueError(
                f"{flag('tool')} torch: another torch profiler is already active in this process; stop it first"
            )
        self._directory = Path(str(config.dir))
        self._config = config
        self._writer = writer
        self.summary: Future[bytes | None] | None = None
        """The kernel summary of the last window; None if it is not made."""
        self._derived: deque[Future[bytes | None]] = deque(maxlen=_QUEUE)  # of the last windows
        self._profile: profile | None = None
        self._prepared: profile | None = None
        """A session in Kineto's warm-up; None if there is none, or once another session has replaced it."""
        self._watch = Patches()  # of torch's functions that begin one
        self._gave_way = False  # whether another session began in the window
        self._recorded: tuple[str, ...] = ()  # the names of the activities
        self._started_in = 0  # nanoseconds
        self._read_waits: Callable[[int], Waited | None] | None = None
        self._ahead = False
        self._collections = Collections()
        # Every start of a profiler asks which kind of CUDA graphs Inductor makes, and so imports this module. That
        # takes up to two seconds, so it is done here rather than in a step.
        if hasattr(torch, "_inductor"):
            import_module("torch._inductor.config")

    def start(self, window: Window) -> None:
        """Begins recording. Raises RuntimeError if the process already runs a profiler."""
        if torch._C._autograd._profiler_enabled():
            raise RuntimeError("another torch profiler is already active in this process")
        began, self._gave_way = time.perf_counter_ns(), False
        self._ahead = self._prepared is not None
        if self._prepared is None:
            self._warm_up()
        self._profile = recording = self._taken()  # an exception from here on ends in `discard`
        if recording is None:
            raise RuntimeError("another torch profiler was prepared at the same moment")
        recording.start_trace()
        for name in ("_prepare_profiler", "_enable_profiler"):
            self._watch.apply(_TORCH, name, partial(partial, self._gives_way))
        self._collections.start()
        emit.log = None if "cpu" in self._recorded else []
        self._started_in = time.perf_counter_ns() - began
        self._read_waits = measure_waits()

    def prepare(self) -> None:
        """Puts Kineto into its warm-up. GPU tracing runs then, but Kineto drops what it traced when `start` begins to
        record.

        A separate session that is thrown away would not help. Every session starts afresh, loses some of its first
        kernels (one more each time, pytorch/pytorch#192021), and may leave the next session without any.
        """
        if not torch._C._autograd._profiler_enabled():
            self._warm_up()

    def _warm_up(self) -> None:
        """Prepares a session, and watches for another one.

        Kineto holds one session. If other code prepares another session, this one ends without torch knowing it, and
        to start it then would kill the process. torch does not say whether that happened. So we replace the function
        that prepares a session.
        """
        self._watch.restore()
        if self._prepared is None:
            self._recorded = _recordable(self._config)
            experimental = None
            if not self._config.with_stack:
                # It keeps torch from making Python objects of the events, which nothing uses, and makes closing a
                # window a fifth cheaper. The trace holds the same events, except for stacks.
                with Suppressed(TypeError):  # an older torch does not know it
                    experimental = torch._C._profiler._ExperimentalConfig(trace_only=True)
            self._prepared = profile(  # an exception from here on ends in `discard`
                activities=[_ACTIVITIES[name] for name in self._recorded],
                record_shapes=self._config.record_shapes,
                profile_memory=self._config.profile_memory,
                with_stack=self._config.with_stack,
                with_flops=self._config.with_flops,
                experimental_config=experimental,
            )
        self._prepared.prepare_trace()
        _keep_cupti()
        self._watch.apply(_TORCH, "_prepare_profiler", partial(partial, self._gives_way))

    def _gives_way(self, begin: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Begins another session as torch does. Ours ends first, and its window is lost: if both ran, what one of them
        exports later would kill the process, or the other could not begin."""
        self._prepared, self._gave_way = None, self._gave_way or self._profile is not None
        with Suppressed(Exception, says="the window did not end ahead of another torch profiler"):
            self._end()
        return begin(*args, **options)

    def _taken(self) -> profile | None:
        """Stops watching, and returns the session in warm-up, if there is one."""
        if self._prepared is not None and not self._watch:
            self._warm_up()  # the host interrupted that; an unprepared session must not be started
        self._watch.restore()
        recording, self._prepared = self._prepared, None
        return recording

    def stop(self, window: Window, metadata: dict[str, Any]) -> None:
        recording, self.summary = self._profile, None
        if self._gave_way:
            raise RuntimeError("another torch profiler was started in it")
        if recording is None:
            return
        waited = None if self._read_waits is None else self._read_waits(0)
        final = window.path(self._directory, TRACE_SUFFIX)
        raw = self._writer.raw_path(final)
        of = None if waited is None else 1000 * waited.waited
        behind = _detach_cupti() if window.final and "cuda" in self._recorded else None
        how = Profiler(self._config.activities, self._recorded, self._started_in, self._ahead, of, behind)
        metadata = {**metadata, "profiler": asdict(how)}
        try:
            recording.add_metadata_json("megaprof", json.dumps(metadata))
            if (of_graphs := graph_naming.text()) is not None:
                recording.add_metadata_json(ranges.GRAPHS_KEY, of_graphs)
            _stop(recording)
            recording.export_chrome_trace(str(raw))
            timed = [*(emit.log or ()), *((PREFIX + GARBAGE, *span) for span in self._collections.ended)]
            if timed and raw.exists():  # it does not exist if the disk is full
                add_ranges(raw, timed)
        except BaseException:
            for unfinished in (raw, kineto_temporary(raw)):
                unfinished.unlink(missing_ok=True)
            self.discard()
            raise
        self._end()
        suffixes = [KERNELS_SUFFIX] if self._config.kernels else []
        suffixes += [STACKS_SUFFIX, DEVICE_STACKS_SUFFIX] if "stacks" in self._config.export else []
        files = {suffix: window.path(self._directory, suffix) for suffix in suffixes}
        # Now, because it may be renamed or removed before the files are derived.
        source = self._source(raw, files)
        if metadata.get("device") == "cuda" and raw.exists():
            trace = open(raw, "rb")  # noqa: SIM115 - the function that it is given to closes it
            self._writer.run(partial(_look_for_kernels, trace, final, how))
        if "trace" in self._config.export:
            self._writer.submit(raw, final)
        else:
            raw.unlink(missing_ok=True)
        if source is not None:
            identity = {key: metadata.get(key) for key in _IDENTITY}
            self.summary = self._writer.run(partial(self._writer.derive, source, files, identity))
            self._derived.append(self.summary)

    def _source(self, raw: Path, files: Mapping[str, Path]) -> BinaryIO | None:
        """Opens the trace from which ``files`` are derived; None if there is none, or if too many windows wait."""
        names = ", ".join(path.name for path in files.values())
        if len(self._derived) == _QUEUE and not self._derived[0].done():
            logger.warning("megaprof: the writer is behind by %d windows; no %s", _QUEUE, names)
        elif files:
            with Suppressed(OSError, says=f"no {names}: there is no trace to make it from"):
                return open(raw, "rb")
        return None

    def discard(self) -> None:
        # It leaves the warm-up as torch does: starts a recording, which is then ended at once and is empty.
        recording = self._taken()
        if recording is not None and not torch._C._autograd._profiler_enabled():
            self._profile = recording
            recording.start_trace()
        self._end()

    def _end(self) -> None:
        """Switches Kineto off, however far its start or its stop has come. Can be run twice."""
        recording = self._profile
        if recording is None:
            return
        emit.log = None
        self._watch.restore()
        self._collections.stop()
        if torch._C._autograd._profiler_enabled():
            try:
                _stop(recording)
            finally:
                if torch._C._autograd._profiler_enabled():
                    torch._C._autograd._disable_profiler()
        torch.autograd.profiler._run_on_profiler_stop()  # type: ignore[no-untyped-call]  # the last step of stopping
        # Frees what was recorded at once. A ``profile`` is part of a reference cycle, so it would stay until the next
        # garbage collection, which Megatron may have switched off. Until then it would hold the window's memory, and
        # weak references to tensors. With those ``torch.utils.swap_tensors`` fails, which FSDP2 uses to move a model.
        recording.profiler = None
        self._profile = None


def _recordable(config: ProfileConfig) -> tuple[str, ...]:
    """Returns the names of the activities that can be recorded now. A host may begin to use CUDA between two windows.

    Asking Kineto for CUDA activity without a device prints a warning per window. Kineto must have been built with it.
    And the process must have initialised CUDA already: otherwise the profiler's synchronisation at the end of a window
    would do so, for example in a CPU actor on a GPU machine.
    """
    cuda = torch.cuda.is_initialized() and ProfilerActivity.CUDA in supported_activities()  # type: ignore[no-untyped-call]
    return tuple(name for name in config.activities if name != "cuda" or cuda)


def _look_for_kernels(trace: BinaryIO, final: Path, how: Profiler) -> None:
    """Warns at once if the window of a model on a GPU holds no kernel. Runs on the writer's thread. Reads the trace
    piece by piece, because a search holds the interpreter's lock."""
    with trace:
        end = b""
        while piece := trace.read(_PIECE):
            if _KERNEL in end + piece:
                return
            end = piece[-len(_KERNEL) :]
    if "cuda" in how.recorded:
        reason = "another tool may hold CUPTI (nsys, DCGM, another profiler), or Kineto lost them"
    elif "cuda" in how.asked:
        reason = "Kineto has no support for it in this process"
    else:
        reason = f"{flag('activities')} does not ask for cuda"
    logger.warning(
        "megaprof: %s holds no GPU kernel although the model is on a GPU: %s. The report can say nothing of it",
        final.name,
        reason,
    )


def _stop(recording: profile) -> None:
    """Stops the recording without torch's own wait for the device, which has no limit. The session has already waited,
    with a limit.

    Kineto then only flushes what CUPTI has, and CUPTI's flush synchronises nothing (CUPTI 11 to 13). A process that
    ends while Kineto records would crash, so Kineto is stopped in any case.
    """
    if recording.profiler is not None:
        recording.profiler.use_device = None
    recording.stop()


_TEARDOWN, _NO_RETURN = "TEARDOWN_CUPTI", "DISABLE_CUPTI_LAZY_REINIT"
_SINCE = 12, 6
_detaches = False  # whether the variable is ours


def _detach_cupti() -> str:
    """Has the session that ends now detach CUPTI from this process, so that the job is as quick as before. Returns
    ``detached``, or why it does not.

    Kineto leaves CUPTI attached when a session ends, and all that launches kernels is then slower for the rest of the
    run (pytorch/pytorch#144455). A session that ends while ``TEARDOWN_CUPTI`` is 1 in the process's environment
    detaches it, in the next CUDA call of the process. Kineto reads the variable anew each time.

    A session that begins before that call records no kernel (pytorch/kineto#1554), and older versions of Kineto crash
    if both sessions detach it (pytorch/kineto#1169). So only the last window does. The variable stays 1 until Kineto
    has been prepared again, because it attaches CUPTI again only then. CUDA graphs crashed after that before CUDA 12.6
    (pytorch/pytorch#151124); nobody promises that they do not any more, so processes with graphs keep CUPTI.
    """
    global _detaches
    for name in (_TEARDOWN, _NO_RETURN):
        if name in os.environ:
            return f"attached: {name}={os.environ[name]} is set"
    version = tuple(map(int, str(torch.version.cuda or "0").split(".")[:2]))
    if version < _SINCE:
        return f"attached: CUDA {torch.version.cuda} is older than {'.'.join(map(str, _SINCE))}"
    if graph_naming.graphs:
        return "attached: the process has CUDA graphs"
    _detaches, os.environ[_TEARDOWN] = True, "1"
    return "detached"


def _keep_cupti() -> None:
    """Has the session that was just prepared leave CUPTI attached, unless `_detach_cupti` follows."""
    global _detaches
    if _detaches:
        _detaches = False
        os.environ.pop(_TEARDOWN, None)


_TAIL = re.compile(rb'\s*\],\s*"traceName"')
_BASE = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d+)')
_EVENTS = b'"traceEvents"'
_CHUNK = 1 << 16


def add_ranges(trace: Path, logged: Sequence[LoggedRange]) -> None:
    """Appends ``logged`` to the events of ``trace``, an uncompressed Kineto trace, in place: garbage collections, and
    our ranges without CPU activity.

    Kineto records user annotations only with CPU activity, and that is the expensive part. Without it a window costs
    next to no time, but its kernels belong to no microbatch. So the host times the ranges (0.3 us each) and adds them
    to the trace as the user annotations that they would have been. Kernels are attributed by their launch calls, which
    CUDA activity does record. Both clocks count nanoseconds since the epoch.

    Reads and writes only the ranges and both ends of the file. Raises ValueError if the file does not look like
    Kineto's (torch 2.6 to 2.13), and leaves it unchanged.
    """
    if not logged:
        return
    with open(trace, "r+b") as file:
        # Kineto writes the base that it counts from before the events, after metadata of any length.
        head = b""
        while _EVENTS not in head:
            if not (chunk := file.read(_CHUNK)):
                raise ValueError("the trace has no events")
            head += chunk
        match = _BASE.search(head)
        base = 0 if match is None else int(match[1])
        start = max(0, file.seek(0, os.SEEK_END) - _CHUNK)
        file.seek(start)
        tail = file.read()
        ends = list(_TAIL.finditer(tail))
        if not ends:
            raise ValueError(f"{trace} has no end of Kineto's, so our ranges cannot be added to it")
        position = ends[-1].start()
        empty = tail[:position].rstrip().endswith(b"[")
        events = ",\n".join(
            json.dumps(
                {
                    "ph": "X",
                    "cat": "user_annotation",
                    "name": name,
                    "pid": os.getpid(),
                    "tid": thread,
                    "ts": (start_ns - base) / 1000,
                    "dur": (end_ns - start_ns) / 1000,
                    "args": {"clock": "host"},
                }
            )
            for name, start_ns, end_ns, thread in logged
        )
        file.seek(start + position)
        file.write((b"\n" if empty else b",\n") + events.encode() + tail[position:])

"""Opens capture ranges in Nsight Systems, and builds command lines of ``nsys profile``, which runs around a process.

nsys writes its own files. A ``.nsys.json`` per window carries the metadata that those cannot hold. Option names and
values are those of ``nsys profile`` (Nsight Systems user guide, "CLI Profile Command Switch Options").
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from megaprof.artifacts.places import is_remote
from megaprof.artifacts.writer import Artifact, Writer
from megaprof.config.options import ProfileConfig, flag
from megaprof.config.values import TRAIN_OVERALL
from megaprof.formats.metadata import NSYS_SUFFIX, NSYS_WINDOW, SESSION_VARIABLE
from megaprof.formats.ranges import DOMAIN
from megaprof.recorders import Window, emit
from megaprof.runtime.isolation import from_host, logger

#: Either shows that nsys waits for an NVTX range: nsys sets one itself, the other because `megaprof nsys` asks for it.
NVTX_VARIABLES = ("NSYS_NVTX_PROFILER_RANGE", "NSYS_NVTX_PROFILER_REGISTER_ONLY")


class NsysRecorder:
    """Opens one capture range per window. Ranges reach nsys as NVTX ranges in the domain ``megaprof``.

    nsys waits for cudaProfilerStart or, if its command line says so, for the range `formats.metadata.NSYS_WINDOW`.
    Raises ValueError if this process does not use CUDA and nsys does not wait for the range: cudaProfilerStart would
    have no effect, and would initialise CUDA although the host did not.
    """

    def __init__(self, config: ProfileConfig, writer: Writer) -> None:
        self._by_range = any(name in os.environ for name in NVTX_VARIABLES)
        if not self._by_range and not _cuda().is_initialized():
            raise ValueError(
                f"{flag('tool')} nsys: there is no CUDA device here, or this process does not use it yet; drop "
                "it, install the hooks where and when the model is on its GPU, or start nsys as "
                "'megaprof nsys --capture nvtx' prints it"
            )
        if SESSION_VARIABLE not in os.environ:
            logger.warning(
                "megaprof: %s nsys, but this process does not seem to run under nsys, and then nothing is captured; "
                "'megaprof nsys' prints the command to put before yours",
                flag("tool"),
            )
        # Otherwise the only sign would be a report without ranges.
        elif (unseeing := emit.reaches_nobody()) is not None:
            logger.error(
                "megaprof: nsys will record no ranges: nvtx %s does not recognise this version of nsys. Install "
                "'nvtx<0.2.12', or a newer nsys (docs/nsys.md lists the pairs)",
                unseeing,
            )
        self._directory = Path(str(config.dir))
        self._writer = writer
        self._running = False

    def start(self, window: Window) -> None:
        self._running = True  # first: an exception from here on ends in `discard`
        try:
            if not self._by_range:
                _call("cudaProfilerStart")
            # Always: if the process is killed, this range and those inside it have no end, which tells the reader.
            emit.push(NSYS_WINDOW)
        except RuntimeError as fault:
            self._running = from_host(fault)  # otherwise the start was refused, and there is nothing to stop
            raise

    def stop(self, window: Window, metadata: dict[str, Any]) -> None:
        if not self._running:
            return
        self.discard()
        final = window.path(self._directory, NSYS_SUFFIX)
        raw = self._writer.raw_path(final)
        raw.write_text(json.dumps({"megaprof": metadata}), encoding="utf-8")
        self._writer.submit(Artifact(raw, final))

    def discard(self) -> None:
        if not self._running:
            return
        emit.pop()
        if not self._by_range:
            _call("cudaProfilerStop")
        self._running = False


def _call(function: str) -> None:
    result = getattr(_cuda().cudart(), function)()
    if int(result) != 0:
        raise RuntimeError(f"{function} answered {result}")


def _cuda() -> Any:
    import torch

    return torch.cuda


#: The APIs to trace. ``osrt`` is left out: operating system calls make up most of a report, and say little here.
TRACE = "cuda,nvtx,cudnn,cublas"
CONTROLLER_TRACE = "nvtx,osrt"
#: The ways to open a capture range, as nsys names them. The first is the default.
CAPTURES = ("cudaProfilerApi", "nvtx")
#: nsys replaces %q{NAME} by an environment variable, %h by the host's name and %p by the process id. It appends the
#: number of the capture range. If the variable is not set, nsys fails.
RANK_NAME = "nsys.rank%q{RANK}.%h.%p"
WORKER_NAME = "nsys.worker.%h.%p"
CONTROLLER_NAME = "nsys.controller.%h.%p"
#: Text that every shell passes on unchanged. ``%q{RANK}`` is no brace expansion: that needs a comma or two dots.
PLAIN = re.compile(r"[\w./%{}=@:+,-]+")


def windows(config: ProfileConfig) -> int | None:
    """Returns how many windows one process captures for one model. None if the configuration does not say: with a
    schedule for the whole run, ranks per role, a window for each role's work, or targets that may be on one step."""
    if config.roles or config.discrete or (TRAIN_OVERALL in config.target and len(config.target) > 1):
        return None
    counts = [config.plan(target).windows for target in config.target]
    limits = [count for count in counts if count is not None]
    return sum(limits) if len(limits) == len(counts) else None


def options(
    config: ProfileConfig,
    *,
    ray: bool = False,
    output: str | None = None,
    shutdown: bool = False,
    models: int = 1,
    capture: str = CAPTURES[0],
) -> dict[str, str]:
    """Returns the options of ``nsys profile`` for every rank, by name.

    ``ray``: returns them as a Ray actor takes them in ``runtime_env={"nsight": ...}``. Ray writes into its own log
    directory unless the output path is absolute. It starts the worker before its ``RANK`` is set, so the file name has
    only host and process; the ``.nsys.json`` next to the reports says which rank it was. ``output``: nsys's
    ``--output``. Without it, the file is in ``config.dir``, and its name has rank, host and process. ``shutdown``: ends
    nsys in each process after its last window rather than with the process. This needs the number of windows, and
    therefore ``models``, the number of models of a process that have hooks. ``capture``: one of `CAPTURES`, which opens
    a capture range: cudaProfilerStart, or an NVTX range, which needs no CUDA.

    Raises ValueError if the configuration has no windows or lacks the nsys tool, or if ``shutdown`` is set and the
    number of windows is unknown.
    """
    _check(config)
    if capture not in CAPTURES:
        raise ValueError(f"capture={capture!r} is not valid; valid: {', '.join(CAPTURES)}")
    if models < 1:
        raise ValueError(f"models={models} is not valid; it must be at least 1")
    end = "repeat"
    if shutdown:
        count = windows(config)
        if count is None:
            raise ValueError(
                f"shutdown: the number of windows is not known with a {flag('schedule')} without an end, "
                f"{flag('role_select')}, {flag('discrete')} or {TRAIN_OVERALL} beside other targets; set "
                f"{flag('steps')} alone, or leave shutdown out"
            )
        end = f"repeat-shutdown:{count * models}"
    by_range = capture == "nvtx"
    return {
        "trace": TRACE,
        "capture-range": capture,
        # nsys matches the exact name, then its domain. The variable has it look at unregistered names, too.
        **(
            {"nvtx-capture": f"{NSYS_WINDOW}@{DOMAIN}", "env-var": "NSYS_NVTX_PROFILER_REGISTER_ONLY=0"}
            if by_range
            else {}
        ),
        "capture-range-end": end,
        # By default, nsys ends the program that it profiles when it shuts down.
        **({"kill": "none"} if shutdown else {}),
        "sample": "none",
        "cpuctxsw": "none",
        "cuda-graph-trace": "graph",
        "force-overwrite": "true",
        **({"cuda-memory-usage": "true"} if config.profile_memory else {}),
        **({"python-sampling": "true"} if config.with_stack else {}),
        **(
            {"o": _plain(_output(config, output, WORKER_NAME))}
            if ray
            else {"output": _output(config, output, RANK_NAME)}
        ),
    }


def controller_options(config: ProfileConfig, *, output: str | None = None) -> dict[str, str]:
    """Returns Ray's nsight options for the controller, which has no GPU and no windows. nsys records NVTX ranges
    and system calls from start to end."""
    _check(config)
    return {
        "trace": CONTROLLER_TRACE,
        "sample": "none",
        "cpuctxsw": "none",
        "force-overwrite": "true",
        "o": _plain(_output(config, output, CONTROLLER_NAME)),
    }


def _check(config: ProfileConfig) -> None:
    if not config.enabled or (config.steps_are_none and not config.listens):
        raise ValueError(f"there is nothing to capture: set {flag('target')}, e.g. to train_actor, and steps")
    if "nsys" not in config.tool:
        raise ValueError(f"{flag('tool')} {' '.join(config.tool)} opens no capture range: use {flag('tool')} nsys")


def _output(config: ProfileConfig, output: str | None, name: str) -> str:
    """Returns ``output``, or else a file called ``name`` in the save directory. Raises ValueError for a remote path:
    nsys writes only local files."""
    if output is not None and is_remote(output):
        raise ValueError(f"output {output!r} is remote, and nsys writes local files only: give a directory")
    if not output and is_remote(str(config.dir)):
        raise ValueError(
            f"{flag('dir')} {config.dir} is remote, and nsys writes local files only: give a local --output, "
            "e.g. /tmp/nsys/rank%q{RANK}.%p"
        )
    return output or str(Path(str(config.dir)).absolute() / name)


def _plain(path: str) -> str:
    """Returns ``path`` if a shell passes it on unchanged, else raises ValueError. Ray joins the options to a shell
    command, and only some versions of Ray quote them."""
    if not PLAIN.fullmatch(path):
        raise ValueError(f"output {path!r} has characters that Ray's shell would interpret; use letters, digits, ./_-%")
    return path

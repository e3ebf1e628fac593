"""The torch profiler: one Kineto trace per window."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from megaprof.artifacts import TRACE_SUFFIX, Job, Writer, artifact_name, raw_path
from megaprof.config import ProfileConfig
from megaprof.recorders import Window

_ACTIVITIES = {"cpu": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA}


class TorchRecorder:
    """Starts Kineto when a window opens; exports on the training thread, compresses in the writer's."""

    def __init__(self, config: ProfileConfig, writer: Writer) -> None:
        if config.dir is None:
            raise ValueError("the torch recorder needs a directory")
        self._directory = Path(config.dir)
        self._config = config
        self._writer = writer
        self._profile: profile | None = None

    def start(self, window: Window) -> None:
        """Raises RuntimeError when another profiler already runs in this process: Kineto holds one session."""
        if torch._C._autograd._profiler_enabled():
            raise RuntimeError("another torch profiler is already active in this process")
        config = self._config
        # ProfilerActivity.CUDA without a CUDA device only prints a warning per window.
        wanted = [_ACTIVITIES[a] for a in config.activities if a != "cuda" or torch.cuda.is_available()]
        recording = profile(
            activities=wanted or [ProfilerActivity.CPU],
            record_shapes=config.record_shapes,
            profile_memory=config.profile_memory,
            with_stack=config.with_stack,
            with_flops=config.with_flops,
            with_modules=config.with_modules,
            acc_events=False,
        )
        recording.start()
        self._profile = recording

    def stop(self, window: Window, metadata: dict[str, Any]) -> None:
        recording, self._profile = self._profile, None
        if recording is None:
            return
        recording.add_metadata_json("megaprof", json.dumps(metadata))
        recording.stop()
        name = artifact_name(window.target, window.role, window.step, window.coords, TRACE_SUFFIX)
        final = self._directory / name
        raw = raw_path(final)
        recording.export_chrome_trace(str(raw))
        self._writer.submit(Job(raw, final))

    def discard(self) -> None:
        recording, self._profile = self._profile, None
        if recording is not None:
            recording.stop()

"""How much memory closing a window takes, as a multiple of what recording it took: one process for each set of options.

    python -m tests.benchmarks.closing

What is recorded is a small model on the CPU, until recording has taken ``MEGABYTES``. Peaks are
the kernel's (``VmHWM``), which is reset between the two. `megaprof.capture.bounds` has the factors.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

MEGABYTES = 100
PRESETS: dict[str, dict[str, bool]] = {
    "plain": {},
    "record_shapes": {"record_shapes": True},
    "profile_memory": {"profile_memory": True},
    "with_flops": {"with_flops": True},
    "with_stack": {"with_stack": True},
    "all": dict.fromkeys(("record_shapes", "profile_memory", "with_flops", "with_stack", "with_modules"), True),
}


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure(options: dict[str, bool]) -> dict[str, float]:
    """Megabytes that recording took, and that closing took beyond it; in a process of its own."""
    import torch

    from megaprof import ProfileConfig
    from megaprof.artifacts.writer import Writer
    from megaprof.parallel.topology import ParallelSizes, WorldLayout
    from megaprof.recorders import Window
    from megaprof.recorders.torch_profiler import TorchRecorder

    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(20)))
    data = torch.ones(4, 16)

    def step() -> None:
        model(data).sum().backward()

    with tempfile.TemporaryDirectory() as directory:
        config = ProfileConfig(target=("train_actor",), dir=directory, activities=("cpu",), **options)
        writer = Writer()
        recorder = TorchRecorder(config, writer)

        def window(number: int) -> Window:
            return Window("train_actor", None, number, WorldLayout(ParallelSizes()).coords(0))

        recorder.start(window(0))  # what is loaded once is not the window's
        step()
        recorder.stop(window(0), {})
        writer.flush()
        before = _status("VmRSS")
        recorder.start(window(1))
        while _status("VmRSS") - before < MEGABYTES << 20:
            for _ in range(20):
                step()
        Path("/proc/self/clear_refs").write_text("5")
        recorded = _status("VmRSS")
        recorder.stop(window(1), {})
        writer.flush()
        closed = _status("VmHWM")
        writer.close()
    return {"recorded": (recorded - before) / 2**20, "closing": (closed - recorded) / 2**20}


def main() -> None:
    for name, options in PRESETS.items():
        code = f"import json; from tests.benchmarks.closing import measure; print(json.dumps(measure({options!r})))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        factor = found["closing"] / found["recorded"]
        print(
            f"{name:16} recording {found['recorded']:6.0f} MB, closing {found['closing']:6.0f} MB: {factor:.1f} times"
        )


if __name__ == "__main__":
    main()

"""One capture range for each window; where nsys is on PATH, its files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from megaprof.testing.gpt import build
from tests.gpu.found import Found
from tests.gpu.job import WARM, config, hooked, machine, small, steps_from, train
from tests.gpu.stand_ins import Cudart, faked

_WINDOWS = 2


def run(work: Path, cpu: bool) -> Found:
    found = Found()
    fake = Cudart()
    with faked(cpu, {"cuda.is_initialized": lambda: True, "cuda.cudart": fake}):
        capture(work, cpu)
    found.expect("windows have files", len(list((work / "files").glob("*.nsys.json"))), _WINDOWS)
    if cpu:
        found.expect("cudaProfilerStart is called", fake.opened, _WINDOWS)
        return found
    tool = shutil.which("nsys")
    if tool is None:
        found.figures["nsys"] = "not on PATH"
        return found
    (work / "inside").mkdir()
    options = ["--trace=cuda,nvtx", "--capture-range=cudaProfilerApi", f"--capture-range-end=repeat:{_WINDOWS}"]
    inner = [sys.executable, "-m", "tests.gpu.parts.nsys", str(work / "inside")]
    command = [tool, "profile", *options, "--export=sqlite", "-o", str(work / "seen"), *inner]
    # Its output is kept from the bench, which waits for the end of what the part prints: nsys may outlive the part.
    with (work / "nsys.log").open("wb") as log:
        done = subprocess.run(command, check=False, stdout=log, stderr=log, timeout=60)
    if done.returncode != 0:
        raise RuntimeError((work / "nsys.log").read_text(errors="replace")[-2000:])
    found.expect("nsys saw each window", len(list(work.glob("seen*.sqlite"))), _WINDOWS)
    return found


def capture(work: Path, cpu: bool) -> None:
    """The job that nsys starts."""
    with machine(cpu, work) as device:
        gpt = build(small(cpu), device)
        train(gpt, WARM)
        with hooked(gpt, config(work / "files", cpu, tool=("nsys",), **steps_from(gpt, _WINDOWS))):
            train(gpt, _WINDOWS)


if __name__ == "__main__":
    capture(Path(sys.argv[1]), False)

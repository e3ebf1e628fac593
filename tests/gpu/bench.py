"""Runs the parts, each in a process of its own with a time limit, so that one that fails leaves the others' figures."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megaprof.recorders import tape
from tests.gpu.parts import PARTS

SECONDS = 540.0
"""For all parts together."""
MOST = 120.0
"""For one part."""
_MODULES = ("torch", "megatron-core", "transformer-engine", "nvtx")


def run(names: Sequence[str], *, cpu: bool, seconds: float = SECONDS) -> dict[str, Any]:
    """Every part by its name: ``figures`` and ``checks``, or ``skipped`` or ``failed`` with the reason."""
    began, parts = time.monotonic(), {}
    for name in names:
        left = min(MOST, seconds - (time.monotonic() - began))
        print(f"{name}: {PARTS[name]}", file=sys.stderr, flush=True)
        parts[name] = _part(name, cpu, left) if left > 5 else {"failed": f"no time was left of {seconds:.0f} s"}
        for line in lines(parts[name]):
            print(f"  {line}", file=sys.stderr, flush=True)
    as_expected = all(map(held, parts.values()))
    return {
        "as_expected": as_expected,
        "device": _device(cpu),
        "versions": _versions(),
        "seconds": time.monotonic() - began,
        "parts": parts,
    }


def _part(name: str, cpu: bool, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix=f"megaprof-gpu-{name}-", ignore_cleanup_errors=True) as work:
        result = Path(work) / "result.json"
        command = [sys.executable, "-m", "tests.gpu.parts", name, work, *(["--cpu"] if cpu else [])]
        began = time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"failed": f"it took longer than {seconds:.0f} s"}
        if done.returncode or not result.exists():
            said = done.stderr.strip().splitlines()
            return {"failed": said[-1] if said else f"exit status {done.returncode}", "stderr": said[-60:]}
        found: dict[str, Any] = json.loads(result.read_text())
        return {**found, "seconds": time.monotonic() - began}


def held(part: Mapping[str, Any]) -> bool:
    """Whether nothing of the part was other than expected."""
    return "failed" not in part and all(check["held"] is not False for check in part["checks"])


def verdict(part: Mapping[str, Any]) -> str:
    """The part in a few words."""
    if "failed" in part:
        return f"failed: {part['failed']}"
    if part["skipped"]:
        return f"skipped: {part['skipped']}"
    wrong = [check["what"] for check in part["checks"] if check["held"] is False]
    return f"not as expected: {', '.join(wrong)}" if wrong else "as expected"


def lines(part: Mapping[str, Any]) -> Iterator[str]:
    """What was expected and what was found, a line for each check."""
    for check in part.get("checks", ()):
        mark = {True: "yes", False: "NO", None: "-"}[check["held"]]
        yield f"{mark:>3} {check['what']}: expected {shown(check['expected'])}, found {shown(check['found'])}"
    yield verdict(part)


def shown(value: Any) -> str:
    """A figure as people read it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(shown, value)) or "none" if isinstance(value, list) else str(value)


def _device(cpu: bool) -> str:
    if cpu:
        return f"no GPU: a rehearsal on the CPU ({platform.machine()})"
    import torch

    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"


def _versions() -> dict[str, str | None]:
    code = "C" if tape.IN_C else "Python"
    return {"python": platform.python_version(), "hooks in": code} | {name: _version(name) for name in _MODULES}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

"""Runs the parts, each in a process of its own with a time limit, so that one that fails leaves the others' figures."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megaprof.recorders import tape
from tests.gpu.parts import PARTS
from tests.gpu.ranks import multi_process_service

SECONDS = 450.0
"""For all parts together."""
LEAST = 15.0
"""A part that has less time than this is not begun."""
LOCK, ENDS = "MEGAPROF_GPU_LOCK", "MEGAPROF_GPU_ENDS"
"""Variables of a part: the file that it locks if it runs alone, and the time (`time.monotonic`) at which all of it
ends."""
_MODULES = ("torch", "megatron-core", "transformer-engine", "nvtx")


class Bench:
    """The parts that are to run, and what was found so far."""

    def __init__(
        self, names: Sequence[str], *, cpu: bool, seconds: float, out: Path | None = None, keep: Path | None = None
    ) -> None:
        self.names, self.cpu, self.out, self.keep = names, cpu, out, keep
        self.began = time.monotonic()
        self.ends = self.began + seconds
        self.parts: dict[str, dict[str, Any]] = {}
        self.device, self.versions = _device(cpu), _versions()

    def run(self) -> dict[str, Any]:
        """First the parts that may run beside each other, and then the others one after the other, each of which is
        imported while the one before it runs."""
        beside = [name for name in self.names if not PARTS[name].alone]
        with self._service(beside) as env, ThreadPoolExecutor(max((os.cpu_count() or 1) // 2, 1)) as pool:
            self._note_all({pool.submit(self._part, name, env if PARTS[name].ranks else {}): name for name in beside})
        with tempfile.NamedTemporaryFile() as lock, ThreadPoolExecutor(1 if self.cpu else 2) as pool:
            alone = [name for name in self.names if PARTS[name].alone]
            self._note_all({pool.submit(self._alone, name, lock.name): name for name in alone})
        return self.found()

    def _note_all(self, running: Mapping[Future[dict[str, Any]], str]) -> None:
        for each in as_completed(running):
            self._note(running[each], each.result())

    def _service(self, names: Sequence[str]) -> contextlib.AbstractContextManager[dict[str, str]]:
        ranks = any(PARTS[name].ranks for name in names) and not self.cpu
        return multi_process_service() if ranks else contextlib.nullcontext({})

    def _alone(self, name: str, lock: str) -> dict[str, Any]:
        with self._service([name]) as env:
            return self._part(name, {**env, LOCK: lock})

    def found(self) -> dict[str, Any]:
        """Every part by its name: ``figures`` and ``checks``, or ``skipped`` or ``failed`` with the reason."""
        missing = {"failed": "not reached"}
        parts = {name: self.parts.get(name, missing) for name in self.names}
        return {
            "as_expected": all(map(held, parts.values())),
            "device": self.device,
            "versions": self.versions,
            "seconds": time.monotonic() - self.began,
            "not_reached": [name for name, part in parts.items() if verdict(part).startswith("failed: not reached")],
            "parts": parts,
        }

    def _note(self, name: str, part: dict[str, Any]) -> None:
        self.parts[name] = part
        print(f"{name} ({part.get('seconds', 0.0):.0f} s): {PARTS[name].what}", file=sys.stderr)
        for line in lines(part):
            print(f"  {line}", file=sys.stderr, flush=True)
        if self.out is not None:  # now, because the machine may go away
            partial = self.out.with_name(f"{self.out.name}.partial")
            partial.write_text(json.dumps(self.found()))
            partial.replace(self.out)

    def _part(self, name: str, env: Mapping[str, str]) -> dict[str, Any]:
        left = self.ends - time.monotonic()
        if left < LEAST:
            return not_reached(left)
        with tempfile.TemporaryDirectory(prefix=f"megaprof-gpu-{name}-", ignore_cleanup_errors=True) as work:
            found = _process(name, work, self.cpu, left, {**env, ENDS: str(self.ends)})
            left = self.ends - time.monotonic()
            if "failed" in found and left < LEAST:  # ranks are ended before their part, and that before all is
                found["failed"] = f"{not_reached(left)['failed']} when it ended: {found['failed']}"
            if self.keep is not None and (Path(work) / "keep").exists():
                shutil.copytree(Path(work) / "keep", self.keep, dirs_exist_ok=True)
            return found


def not_reached(left: float) -> dict[str, Any]:
    """What stands for a part that was not begun."""
    return {"failed": f"not reached: {max(left, 0.0):.0f} s were left"}


def _process(name: str, work: str, cpu: bool, seconds: float, env: Mapping[str, str]) -> dict[str, Any]:
    result = Path(work) / "result.json"
    command = [sys.executable, "-m", "tests.gpu.parts", name, work, *(["--cpu"] if cpu else [])]
    given = {**os.environ, **env}
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds, env=given)
    except subprocess.TimeoutExpired as late:
        # What was said is bytes here, whatever was asked for.
        said = late.stderr.decode(errors="replace") if isinstance(late.stderr, bytes) else late.stderr or ""
        return {"failed": f"it took longer than {seconds:.0f} s", "stderr": said.splitlines()[-60:]}
    lines = done.stderr.strip().splitlines()
    if result.exists():
        found: dict[str, Any] = json.loads(result.read_text())
        return {**found, "stderr": lines[-60:]} if "failed" in found else found
    how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit status {done.returncode}"
    telling = next((line for line in lines if line.startswith("Timeout (")), lines[-1] if lines else "")
    return {"failed": f"{how}: {telling}", "stderr": lines[-60:]}


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

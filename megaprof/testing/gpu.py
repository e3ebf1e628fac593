"""One command for everything of megaprof that needs a GPU: ``python -m megaprof.testing.gpu --json FILE``.

Needs torch with CUDA, megatron-core, and what megaprof's own reports need; nothing is downloaded. Each part is a
process of its own with a time limit, so that one that fails leaves the others' figures. ``--cpu`` rehearses all parts
without a GPU: with `cpu_megatron`, gloo, and replaced CUDA calls where a part is about those. Its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

#: What each part is about; its function in `megaprof.testing.gpu_parts` has its name.
PARTS = {
    "capture": "PP=1 on NCCL, bf16: the report against CUDA events, the kernel summary against torch's key_averages()",
    "pipeline": "PP=2 as two processes on the one GPU, through host memory: slow stage, what-if against a re-run",
    "interleaved": "the same with two model chunks per stage",
    "cost": "step time off, armed, ranges, CUDA only, full profiler and timeline; the end of a window against torch's",
    "graphs": "full-iteration CUDA graphs, and those of single layers: counted, captured, said",
    "memory": "CUDA memory history of a window, and the snapshot on out of memory",
    "nsys": "cudaProfilerStart and Stop, seen by nsys where there is one",
    "compiled": "layers compiled by torch.compile: same numbers, said in the report",
    "overlap": "gradient reduction that overlaps with compute, in a group of one: group names on kernels",
}
SECONDS = 540.0
"""For all parts together."""
MOST = 150.0
"""For one part."""
BEGIN, END = "<!-- measured -->", "<!-- /measured -->"


def run(names: Sequence[str], *, cpu: bool, seconds: float = SECONDS) -> dict[str, Any]:
    """Every part by its name: ``figures`` and ``checks`` (name to whether it held), or ``failed`` with the reason."""
    began, parts = time.monotonic(), {}
    for name in names:
        left = min(MOST, seconds - (time.monotonic() - began))
        print(f"{name}: {PARTS[name]}", file=sys.stderr, flush=True)
        parts[name] = _part(name, cpu, left) if left > 5 else {"failed": f"no time was left of {seconds:.0f} s"}
        print(f"  {_verdict(parts[name])}", file=sys.stderr, flush=True)
    return {"device": _device(cpu), "versions": _versions(), "seconds": time.monotonic() - began, "parts": parts}


def _part(name: str, cpu: bool, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix=f"megaprof-gpu-{name}-", ignore_cleanup_errors=True) as work:
        result = Path(work) / "result.json"
        command = [sys.executable, "-m", "megaprof.testing.gpu_parts", name, work, *(["--cpu"] if cpu else [])]
        began = time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"failed": f"it took longer than {seconds:.0f} s"}
        if done.returncode or not result.exists():
            lines = done.stderr.strip().splitlines()
            return {"failed": lines[-1] if lines else f"exit status {done.returncode}", "stderr": lines[-60:]}
        found: dict[str, Any] = json.loads(result.read_text())
        return {**found, "seconds": time.monotonic() - began}


def _verdict(part: Mapping[str, Any]) -> str:
    if "failed" in part:
        return f"failed: {part['failed']}"
    wrong = [name for name, held in part["checks"].items() if not held]
    return f"not as expected: {', '.join(wrong)}" if wrong else "as expected"


def _device(cpu: bool) -> str:
    if cpu:
        return f"no GPU: a rehearsal on the CPU ({platform.machine()})"
    import torch

    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"


def _versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {name: version(name) for name in ("torch", "megatron-core", "nvtx")}


def table(found: Mapping[str, Any]) -> str:
    """Markdown: device and versions, and a row for each part with what held and its figures."""
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    lines = [
        f"{found['device']}; {versions}; {found['seconds']:.0f} s.",
        "",
        "| part | result | figures |",
        "|---|---|---|",
    ]
    for name, part in found["parts"].items():
        figures = "; ".join(
            f"{key.replace('_', ' ')} {_shown(value)}" for key, value in part.get("figures", {}).items()
        )
        lines.append(f"| {name}: {PARTS[name]} | {_verdict(part)} | {figures} |".replace("\n", " "))
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(_shown, value)) if isinstance(value, list) else str(value)


def write_docs(page: Path, found: Mapping[str, Any]) -> None:
    """Put the table into ``page``, between its two marks. Raises ValueError for a page without them."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: {BEGIN} and {END} must stand in it")
    page.write_text(f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{after}")


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all parts as expected; 1: a part failed or is not; 2: no GPU."""
    parser = argparse.ArgumentParser(prog="python -m megaprof.testing.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--docs", metavar="PAGE", type=Path, help="put the table into this page, between its marks")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--cpu", action="store_true", help="rehearse without a GPU; figures mean nothing")
    args = parser.parse_args(arguments)
    if not args.cpu:
        import torch

        if not torch.cuda.is_available():
            print("there is no GPU that torch can use; --cpu rehearses without one", file=sys.stderr)
            return 2
    found = run(args.parts, cpu=args.cpu)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    if args.docs:
        write_docs(args.docs, found)
    print(table(found))
    return int(any(_verdict(part) != "as expected" for part in found["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())

"""``python -m tests.gpu``: needs torch with CUDA, megatron-core, and what reports need; nothing is downloaded."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.gpu import bench, page
from tests.gpu.parts import PARTS

#: What must be importable beside torch, all of it in one place where an image lacks it (docs/gpu.md).
NEEDED = ("megatron.core", "numpy", "isal", "msgspec", "rich", "jinja2", "fsspec")


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all parts as expected, or skipped; 1: a part failed or is not; 2: no GPU, or a package is missing."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=str(__doc__).splitlines()[0])
    parser.add_argument("--docs", metavar="PAGE", type=Path, help="put a table of all figures into this page")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--seconds", type=float, default=bench.SECONDS, help="for all of it; default: %(default)g")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write all figures here after each part")
    parser.add_argument("--keep", metavar="DIR", type=Path, help="leave recordings of jobs here, a directory for each")
    parser.add_argument("--cpu", action="store_true", help="rehearse without a GPU; figures mean nothing")
    args = parser.parse_args(arguments)
    missing = [name for name in NEEDED if not _there(name)]
    if missing:
        print(f"missing: {', '.join(missing)}; docs/gpu.md says how to bring them along", file=sys.stderr)
        return 2
    if not args.cpu:
        import torch

        if not torch.cuda.is_available():
            print("there is no GPU that torch can use; --cpu rehearses without one", file=sys.stderr)
            return 2
    chosen = [name for name in PARTS if name in args.parts]
    found = bench.Bench(chosen, cpu=args.cpu, seconds=args.seconds, out=args.out, keep=args.keep).run()
    if args.docs:
        page.write(args.docs, found)
    print(json.dumps(found))
    return int(not found["as_expected"])


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(main())

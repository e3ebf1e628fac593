"""Shows what megaprof answers otherwise than expected, or accepts it; see `tests.golden.answers`."""

from __future__ import annotations

import argparse
import sys

from tests.golden.answers import NAMES, accept, answer, complaint


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.golden")
    parser.add_argument("--accept", action="store_true", help="write what is answered now as what is expected")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"inputs (default: all): {', '.join(NAMES)}")
    given = parser.parse_args()
    if unknown := set(given.names) - set(NAMES):
        parser.error(f"no inputs: {', '.join(sorted(unknown))}")
    changed = 0
    for name in given.names or NAMES:
        if given.accept:
            accept(name)
        elif found := complaint(name, answer(name)):
            changed += 1
            print(found)
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())

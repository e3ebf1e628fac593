"""A controller: annotated work, no hooks, no torch."""

from __future__ import annotations

import sys

import megaprof


@megaprof.annotate(role="rollout")
def generate() -> None:
    with megaprof.annotate(message="inner"):
        pass


if __name__ == "__main__":
    with megaprof.role("critic"):
        generate()
    assert "torch" not in sys.modules

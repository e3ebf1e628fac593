"""What a run trained: each rank writes a line after each step of an optimizer, a digest of what that changed.

Equal lines are equal parameters, bit by bit.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def write_digests(directory: str) -> None:
    """From now on in this process, to a file in ``directory``."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        digest = hashlib.sha256()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
        with Path(directory, f"rank{os.environ['RANK']}").open("a") as file:
            print(digest.hexdigest(), file=file)

    register_optimizer_step_post_hook(note)


def read_digests(directory: Path) -> dict[str, list[str]]:
    """By rank: its parameters after each step of the optimizer."""
    return {path.name: path.read_text().split() for path in sorted(directory.iterdir())}

"""Where the files of a control directory lie."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from megaprof.formats.names import sanitise, shard_of

CONTROL = "control"
REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_ROLE = "role-"


@dataclass(frozen=True)
class Paths:
    """One control directory: that of a job, or of one role of it.

    ``requests`` is written by commands and read by the lowest rank only; ``orders`` is what all ranks look at.
    """

    root: Path
    world: int = 1

    @classmethod
    def of(cls, directory: str | os.PathLike[str], role: str | None, world: int) -> Paths:
        """Jobs of several roles (actor, critic) may share a save directory and each have their own rank 0."""
        root = Path(directory, CONTROL)
        return cls(root / (_ROLE + sanitise(role)) if role else root, world)

    @property
    def run(self) -> Path:
        return self.root / "run.json"

    @property
    def requests(self) -> Path:
        return self.root / "requests"

    @property
    def orders(self) -> Path:
        return self.root / "orders"

    @property
    def answers(self) -> Path:
        return self.root / "answers"

    def request(self, request: str) -> Path:
        return self.requests / f"{request}.json"

    def order(self, request: str) -> Path:
        return self.orders / f"{request}.json"

    def go(self, request: str) -> Path:
        return self.orders / f"{request}.go.json"

    def refusal(self, request: str) -> Path:
        return self.answers / request / "refused.json"

    def answer(self, request: str, rank: int) -> Path:
        return self._of_rank(self.answers / request, rank)

    def status(self, rank: int) -> Path:
        return self._of_rank(self.root / "status", rank)

    def _of_rank(self, parent: Path, rank: int) -> Path:
        return parent / shard_of(rank, self.world) / f"rank{rank:05d}.json"


def control_directories(directory: Path) -> list[Path]:
    """The control directories below a save directory that hold a run: the job's own first, then those of its roles."""
    root = directory / CONTROL
    try:
        roles = sorted(entry.path for entry in os.scandir(root) if entry.name.startswith(_ROLE))
    except OSError:
        return []
    return [path for path in (root, *map(Path, roles)) if (path / "run.json").exists()]


def refresh(directory: Path) -> None:
    """List ``directory``: a network file system then asks its server again for what it had cached of it."""
    try:
        with os.scandir(directory) as entries:
            next(entries, None)
    except OSError:
        return

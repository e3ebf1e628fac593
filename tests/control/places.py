"""Files of a control directory by their paths, as a test looks at them and writes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaprof.control import directory as places
from megaprof.control.gate import Gate
from megaprof.formats.files import Directory, Owner
from megaprof.formats.job import records
from megaprof.formats.job import run as run_json
from megaprof.formats.job.run import RunRecord


@dataclass(frozen=True)
class Paths:
    """The control directory ``root`` of a job of ``world`` ranks."""

    root: Path
    world: int = 1

    @classmethod
    def of(cls, directory: Path, role: str | None, world: int) -> Paths:
        return cls(places.path_of(directory, places.part(role)), world)

    def __getattr__(self, name: str) -> Path:
        if name not in ("requests", "orders", "answers"):
            raise AttributeError(name)
        return self.root / name

    @property
    def run(self) -> Path:
        return self.root / "run.json"

    def request(self, identity: str) -> Path:
        return self.root.joinpath(*places.request(identity))

    def order(self, identity: str) -> Path:
        return self.root.joinpath(*places.order(identity))

    def go(self, identity: str) -> Path:
        return self.root.joinpath(*places.start(identity))

    def refusal(self, identity: str) -> Path:
        return self.root.joinpath(*places.refusal(identity))

    def answer(self, identity: str, rank: int) -> Path:
        return self.root.joinpath(*places.answer(identity, rank, self.world))

    def status(self, rank: int) -> Path:
        return self.root.joinpath(*places.status(rank, self.world))


def write(path: Path, record: dict[str, Any], *, mode: int = 0o644) -> Owner:
    with Directory.open(path.parent) as directory:
        return Owner.of(records.write(directory, path.name, record, mode=mode))


def overwrite(path: Path, record: dict[str, Any], size: int) -> None:
    with Directory.open(path.parent) as directory:
        records.overwrite(directory, path.name, record, size)


def read(path: Path, owner: Owner | None = None) -> dict[str, Any]:
    try:
        with Directory.open(path.parent) as directory:
            return records.read(directory, path.name, owner)
    except FileNotFoundError:
        raise records.Absent from None


def read_run(root: Path, owner: Owner | None = None) -> RunRecord:
    with Directory.open(root) as directory:
        return run_json.read_run(directory, owner)


class Gated:
    """A gate as the lowest rank's background thread looks through it."""

    def __init__(self, directory: Path, run: RunRecord) -> None:
        self.directory = directory
        self.paths = Paths.of(directory, None, run.world)
        with self._control() as control:
            self.gate = Gate(control, run)

    def look(self) -> None:
        with self._control() as control:
            self.gate.look(control)

    def _control(self) -> places.ControlDirectory:
        return places.ControlDirectory.own(self.directory, None, None)

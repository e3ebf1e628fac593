"""Files of a control directory by their paths, as a test looks at them and writes them; ranks without a training."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import msgspec

from megaprof import ProfileConfig
from megaprof.artifacts.writer import Writer
from megaprof.control import directory as within
from megaprof.control.directory import ControlDirectory
from megaprof.control.listener import Listener
from megaprof.formats.job import CAPTURE, RUN, STATUS, Answer, RankStatus, Record, Request, RunRecord
from megaprof.formats.names import appearing, host
from megaprof.parallel.topology import WorldLayout

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Paths:
    """The control directory ``root`` of a job of ``world`` ranks."""

    root: Path
    world: int = 1

    @classmethod
    def of(cls, directory: Path, role: str | None, world: int) -> Paths:
        return cls(ControlDirectory(directory, role).path, world)

    @property
    def run(self) -> Path:
        return self.root / RUN

    @property
    def capture(self) -> Path:
        return self.root / CAPTURE

    def status(self, rank: int) -> Path:
        return self.root.joinpath(*within.names_of(STATUS, rank, self.world))

    def request(self) -> Request:
        return read(self.capture, Request)

    def says(self, rank: int) -> Answer | None:
        """What a rank says to the request."""
        return read(self.status(rank), RankStatus).capture


def write(path: Path, record: Record | dict[str, Any]) -> None:
    """As a rank or a command writes it, and also what none of them would write."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with appearing(path) as file:
        file.write(json.dumps(record).encode() if isinstance(record, dict) else msgspec.json.encode(record))


def read(path: Path, kind: type[R]) -> R:
    """Raises FileNotFoundError and ValueError."""
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        return within.load(directory, path.name, kind)
    finally:
        os.close(directory)


def status(run: RunRecord, layout: WorldLayout, rank: int, **other: Any) -> RankStatus:
    """Of a rank that runs in this process."""
    coords, now = layout.coords(rank), time.time()
    record = {"run": run.run, "rank": rank, "host": host(), "name": "here", "pid": os.getpid(), "time": now}
    record |= {"coords": {axis: getattr(coords, axis) for axis in ("pp", "tp", "cp", "ep", "dp")}}
    record |= {"interval": run.interval, "since": now, "calls": []}
    return msgspec.convert(record | other, RankStatus)


def listening(directory: Path, layout: WorldLayout, rank: int, *, every: float = 0.1) -> Listener:
    """A rank without a training thread."""
    session: Any = SimpleNamespace(
        config=ProfileConfig(target=("train_actor",), dir=str(directory), on_demand=True),
        coords=layout.coords(rank),
        layout=layout,
        role=None,
        agenda=SimpleNamespace(calls={}, wishes={}),
        timeline=None,
        off=None,
        writer=Writer(),
        demand=None,
    )
    with patch("megaprof.control.listener.interval", lambda world: every):
        return Listener(session, directory)


@contextmanager
def answering(
    paths: Paths, run: RunRecord, layout: WorldLayout, ranks: Sequence[int], *, last: str = "done"
) -> Iterator[None]:
    """``ranks`` of a job answer a request, in a thread of this process, as their files would; ``last``: the state in
    which the last of them ends."""
    ended = threading.Event()

    def say(rank: int, **capture: Any) -> None:
        write(paths.status(rank), status(run, layout, rank, capture=capture or None))

    def wait(for_first: bool) -> Request | None:
        while not ended.wait(0.02):
            for rank in () if for_first else ranks:
                say(rank)
            with suppress(FileNotFoundError):
                request = paths.request()
                if request.first is not None or not for_first:
                    return request
        return None

    def answer() -> None:
        if (request := wait(False)) is None:
            return
        for rank in ranks:
            say(rank, request=request.id, state="accepted", calls=1, seconds=0.1)
        if wait(True) is None:
            return
        done = {"request": request.id, "state": "done", "steps": (5, 6)}
        for rank in ranks[:-1]:
            say(rank, **done, files=(f"{rank}.gz",))
        missed = {"request": request.id, "state": last, "reason": "too late"}
        say(ranks[-1], **(done | {"files": (f"{ranks[-1]}.gz",)} if last == "done" else missed))

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()

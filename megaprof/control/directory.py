"""The control directory: where its files lie, and how it is opened so that nobody else can lead us astray in it.

A save directory may be one that others can write to. What they put in the place of our directories, or into them, must
not make a job change, remove or believe anything: each directory is opened from the one above it, without following
links, and the one that acts upon what it finds asks of each opened one whether it is its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from megaprof.formats import records
from megaprof.formats import run as run_json
from megaprof.formats.files import Directory, Owner, Unsafe
from megaprof.formats.names import sanitise, shard_of

CONTROL = "control"
_ROLE = "role-"
REQUESTS, ORDERS, ANSWERS, STATUS = "requests", "orders", "answers", "status"
_MOST_ROLES = 256

Place = tuple[str, ...]
"""The names that lead from a control directory to a file or a directory in it."""

RUN: Place = (run_json.NAME,)


def request(identity: str) -> Place:
    """What is asked for. Written by a command, read by the lowest rank only."""
    return REQUESTS, f"{identity}.json"


def order(identity: str) -> Place:
    """A request that is carried out. All ranks look here."""
    return ORDERS, f"{identity}.json"


def start(identity: str) -> Place:
    """From which call on."""
    return ORDERS, f"{identity}.go.json"


def refusal(identity: str) -> Place:
    """Why it is not even an order."""
    return ANSWERS, identity, "refused.json"


def answer(identity: str, rank: int, world: int) -> Place:
    """What a rank says to it."""
    return ANSWERS, identity, *_of_rank(rank, world)


def status(rank: int, world: int) -> Place:
    """Where a rank stands."""
    return STATUS, *_of_rank(rank, world)


def _of_rank(rank: int, world: int) -> Place:
    shard = shard_of(rank, world)
    name = f"rank{rank:05d}.json"
    return (shard, name) if shard else (name,)


def part(role: str | None) -> str | None:
    """The directory of a role inside the control directory: jobs of several roles (actor, critic) may share a save
    directory and each have their own rank 0. None for a job without roles, whose directory is the control directory."""
    return None if role is None else _ROLE + sanitise(role)


def path_of(directory: Path, part: str | None) -> Path:
    """Where a control directory lies, for messages."""
    root = directory / CONTROL
    return root if part is None else root / part


class ControlDirectory:
    """One control directory, held open for as long as one look takes, as a context manager.

    With an owner, whatever is opened in it must be the owner's alone. Methods raise OSError, and `Unsafe` with the path
    where a directory is not what it should be.
    """

    def __init__(self, root: Directory, owner: Owner | None) -> None:
        self._root = root
        self.owner = owner
        """Who alone may write to it, None where that does not matter: for somebody who only looks."""

    @classmethod
    def look(cls, directory: Path, part: str | None) -> ControlDirectory:
        """The control directory of the save directory `directory`, whoever it belongs to. For readers."""
        with Directory.inside(directory, CONTROL) as root:
            return cls(_descend(root, _parts(part), None, None), None)

    @classmethod
    def own(cls, directory: Path, part: str | None, owner: Owner | None) -> ControlDirectory:
        """The same for a rank of the job: made where it does not exist, and refused where anybody else could write to
        it. `owner` is whom our own files belong to there, as an earlier look found it."""
        with _opened(directory) as root:
            owner = root.owner() if owner is None else owner
            root.check(owner)
            return cls(_descend(root, _parts(part), owner, 0o755), owner)

    @property
    def path(self) -> Path:
        """Where it lies, for messages."""
        return self._root.path

    @contextmanager
    def folder(self, *place: str, create: int | None = None) -> Iterator[Directory]:
        """A directory in it, made with the permissions `create` where it does not exist."""
        with _descend(self._root, place, self.owner, create) as opened:
            yield opened

    def read(self, place: Place, owner: Owner | None = None) -> dict[str, Any]:
        """The record there; with `owner`, only one that nobody else can have written. Raises Absent, BadRecord."""
        try:
            with self.folder(*place[:-1]) as folder:
                return records.read(folder, place[-1], owner)
        except (FileNotFoundError, NotADirectoryError):
            raise records.Absent from None

    def write(self, place: Place, record: dict[str, Any], *, create: bool = False, mode: int = 0o644) -> Owner:
        """`record` appears there; `create`: with the directories above it. Returns whose file it is."""
        with self.folder(*place[:-1], create=0o755 if create else None) as folder:
            return Owner.of(records.write(folder, place[-1], record, mode=mode))

    def overwrite(self, place: Place, record: dict[str, Any], size: int) -> None:
        """`record` in place of what is written there, in `size` bytes, with the directories above it."""
        with self.folder(*place[:-1], create=0o755) as folder:
            records.overwrite(folder, place[-1], record, size)

    def unlink(self, *places: Place) -> None:
        """Remove what is there of these files."""
        for place in places:
            with suppress(OSError, Unsafe), self.folder(*place[:-1]) as folder:
                folder.unlink(place[-1])

    def exists(self, place: Place) -> bool:
        """Whether anything is there."""
        try:
            with self.folder(*place[:-1]) as folder:
                return folder.exists(place[-1])
        except FileNotFoundError:
            return False

    def owner_of(self, place: Place) -> Owner:
        """Whose file it is."""
        with self.folder(*place[:-1]) as folder:
            return Owner.of(folder.stat(place[-1]))

    def refresh(self, *place: str) -> None:
        """List a directory, if it is there: a network file system then asks its server again for what it had cached."""
        with suppress(OSError), self.folder(*place) as folder:
            folder.names(1)

    def __enter__(self) -> ControlDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> None:
        self._root.close()


def parts_with_a_run(directory: Path) -> list[str | None]:
    """The control directories of a save directory that hold a run: the job's own first, then those of its roles."""
    try:
        with ControlDirectory.look(directory, None) as control:
            with control.folder() as folder:
                names = folder.names(_MOST_ROLES)
            roles = sorted(name for name in names if name.startswith(_ROLE))
            found: list[str | None] = [None] if control.exists(RUN) else []
            for role in roles:
                with suppress(OSError, Unsafe):
                    found += [role] if control.exists((role, *RUN)) else []
            return found
    except OSError:
        return []


def _parts(part: str | None) -> Place:
    return () if part is None else (part,)


def _opened(directory: Path) -> Directory:
    """The control directory of a save directory, made where it does not exist."""
    try:
        return Directory.inside(directory, CONTROL)
    except FileNotFoundError:
        if not directory.exists():  # somebody has cleaned up
            os.makedirs(directory, exist_ok=True)
        with Directory.open(directory) as top:
            return top.child(CONTROL, create=0o755)


def _descend(top: Directory, names: Place, owner: Owner | None, create: int | None) -> Directory:
    """The directory that `names` lead to, each from the one above it; `top` stays open."""
    current = top.again()
    for name in names:
        with current:
            below = current.child(name, create=create)
        with _closing_after_fault(below):
            if owner is not None:
                below.check(owner)
        current = below
    return current


@contextmanager
def _closing_after_fault(directory: Directory) -> Iterator[None]:
    try:
        yield
    except BaseException:
        directory.close()
        raise

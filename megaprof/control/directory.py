"""The control directory: where its files lie, and how it is opened so that nobody else can lead us astray in it.

A save directory may be one that others can write to. What they put in the place of our directories, or into them, must
not make a job change, remove or believe anything: each directory is opened from the one above it, without following
links, and the one that acts upon what it finds asks of each opened one whether it is its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from megaprof.formats.files import Directory, Owner, Unsafe
from megaprof.formats.job import records
from megaprof.formats.job import run as run_json
from megaprof.formats.job.requests import REQUEST_ID
from megaprof.formats.names import sanitise, shard_of

CONTROL = "control"
_ROLE = "role-"
REQUESTS, ORDERS, ANSWERS, STATUS = "requests", "orders", "answers", "status"
_SUFFIX, _START, _REFUSED = ".json", ".go.json", "refused.json"
_RANK = re.compile(r"rank\d{5,}\.json", re.ASCII)
_MOST_ROLES = 256

Address = tuple[str, ...]
"""The names that lead from a control directory to a file in it."""

RUN: Address = (run_json.NAME,)


def request(identity: str) -> Address:
    """What is asked for. Written by a command, read by the lowest rank only."""
    return REQUESTS, f"{identity}{_SUFFIX}"


def order(identity: str) -> Address:
    """A request that is carried out. All ranks look here."""
    return ORDERS, f"{identity}{_SUFFIX}"


def start(identity: str) -> Address:
    """From which call on."""
    return ORDERS, f"{identity}{_START}"


def refusal(identity: str) -> Address:
    """Why it is not even an order."""
    return ANSWERS, identity, _REFUSED


def answer(identity: str, rank: int, world: int) -> Address:
    """What a rank says to it."""
    return ANSWERS, identity, *_of_rank(rank, world)


def status(rank: int, world: int) -> Address:
    """Where a rank stands."""
    return STATUS, *_of_rank(rank, world)


def parse_request(name: str) -> str | None:
    """The id in the name of a request, or of an order; None for another file, and for one that is being written."""
    identity = name.removesuffix(_SUFFIX)
    return identity if name.endswith(_SUFFIX) and REQUEST_ID.fullmatch(identity) else None


def parse_start(name: str) -> str | None:
    """The id in the name of a start; None for another file."""
    return parse_request(name.removesuffix(_START) + _SUFFIX) if name.endswith(_START) else None


def is_answer(name: str) -> bool:
    """Whether a file is called as an answer or a refusal is."""
    return name == _REFUSED or _RANK.fullmatch(name) is not None


def _of_rank(rank: int, world: int) -> Address:
    shard = shard_of(rank, world)
    name = f"rank{rank:05d}{_SUFFIX}"
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
    def folder(self, *address: str, create: int | None = None) -> Iterator[Directory]:
        """A directory in it, made with the permissions `create` where it does not exist."""
        with _descend(self._root, address, self.owner, create) as opened:
            yield opened

    def read(self, address: Address, owner: Owner | None = None) -> dict[str, Any]:
        """The record there; with `owner`, only one that nobody else can have written. Raises Absent, BadRecord."""
        try:
            with self.folder(*address[:-1]) as folder:
                return records.read(folder, address[-1], owner)
        except (FileNotFoundError, NotADirectoryError):
            raise records.Absent from None

    def write(self, address: Address, record: dict[str, Any], *, create: bool = False, mode: int = 0o644) -> Owner:
        """`record` appears there; `create`: with the directories above it. Returns whose file it is."""
        with self.folder(*address[:-1], create=0o755 if create else None) as folder:
            return Owner.of(records.write(folder, address[-1], record, mode=mode))

    def overwrite(self, address: Address, record: dict[str, Any], size: int) -> None:
        """`record` in place of what is written there, in `size` bytes, with the directories above it."""
        with self.folder(*address[:-1], create=0o755) as folder:
            records.overwrite(folder, address[-1], record, size)

    def unlink(self, *addresses: Address) -> None:
        """Remove what is there of these files."""
        for address in addresses:
            with suppress(OSError, Unsafe), self.folder(*address[:-1]) as folder:
                folder.unlink(address[-1])

    def exists(self, address: Address) -> bool:
        """Whether anything is there."""
        try:
            with self.folder(*address[:-1]) as folder:
                return folder.exists(address[-1])
        except FileNotFoundError:
            return False

    def owner_of(self, address: Address) -> Owner:
        """Whose file it is."""
        with self.folder(*address[:-1]) as folder:
            return Owner.of(folder.stat(address[-1]))

    def refresh(self, *address: str) -> None:
        """List a directory, if it is there: a network file system then asks its server again for what it had cached."""
        with suppress(OSError), self.folder(*address) as folder:
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


def _parts(part: str | None) -> Address:
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


def _descend(top: Directory, names: Address, owner: Owner | None, create: int | None) -> Directory:
    """The directory that `names` lead to, each from the one above it; `top` stays open."""
    current = top
    for name in names:
        try:
            below = current.child(name, create=create)
        finally:
            if current is not top:
                current.close()
        try:
            if owner is not None:
                below.check(owner)
        except BaseException:
            below.close()
            raise
        current = below
    return current if names else top.again()

"""The control directory of a save directory, and the names of its files.

Only the user of the job can enter it. A rank opens it without following links, and uses it only if it belongs to that
user and is closed to others. So nobody else can have written what lies in it, and that is the whole defence.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from megaprof.formats.files import Directory, Unsafe
from megaprof.formats.job import records
from megaprof.formats.names import sanitise, shard_of

CONTROL, STATUS, COLLECTIVES = "control", "status", "collectives"
_ROLE = "role-"
_MOST_ROLES = 256
_MODE = 0o700


def part(role: str | None) -> str | None:
    """Returns the name of a role's directory inside the control directory; None without a role. Models of several roles
    (actor, critic) may share a save directory, and each has a rank 0."""
    return None if role is None else _ROLE + sanitise(role)


def path_of(directory: Path, part: str | None) -> Path:
    """Returns the path of a control directory, for messages."""
    root = directory / CONTROL
    return root if part is None else root / part


def folder_of(what: str, rank: int, world: int) -> tuple[str, ...]:
    """Returns the names of the directories from the control directory down to a rank's file of the kind `what`."""
    shard = shard_of(rank, world)
    return (what, shard) if shard else (what,)


def name_of(rank: int) -> str:
    """Returns the name of a rank's file there."""
    return f"rank{rank:05d}.json"


def open_any(directory: Path, part: str | None) -> Directory:
    """Opens the control directory of a save directory for a command, whoever it belongs to.

    Raises OSError, and `Unsafe` if it is a link, or no directory, or closed to this user.
    """
    try:
        root = Directory.inside(directory, CONTROL)
        return _fresh(root if part is None else below(root, part))
    except PermissionError:
        path = path_of(directory, part)
        raise Unsafe(f"{path} is closed to you: only the user whose job it is may look and ask") from None


def open_own(directory: Path, part: str | None, probed: os.stat_result | None) -> tuple[Directory, os.stat_result]:
    """Opens it for a rank of the job, and makes it if it does not exist. Also returns what files of ours get there
    (`Directory.probe`), which is `probed` at the next call.

    Raises OSError, and `Unsafe` if anybody else could write to it.
    """
    root = _made(directory)
    try:
        ours = root.probe() if probed is None else probed
        root.check(ours.st_uid, ours.st_mode)
        if stat.S_IMODE(root.stat().st_mode) != _MODE:  # made by hand
            with suppress(OSError):
                root.chmod(_MODE)
    except BaseException:
        root.close()
        raise
    return _fresh(root if part is None else below(root, part, create=_MODE)), ours


def below(directory: Directory, *names: str, create: int | None = None) -> Directory:
    """Opens the directory that `names` lead to, and closes `directory`. Raises OSError and Unsafe."""
    for name in names:
        with directory:
            directory = directory.child(name, create=create)
    return directory


def folder(control: Directory, *names: str, create: bool = False) -> Directory:
    """Opens a directory inside the control directory; with `create`, makes it. Raises OSError and Unsafe."""
    return below(
        control.child(names[0], create=_MODE if create else None), *names[1:], create=_MODE if create else None
    )


def parts_with_a_run(directory: Path) -> list[str | None]:
    """Returns the parts of a save directory's control directory that hold a run: None for the directory itself, and the
    directories of roles. Raises Unsafe.
    """
    try:
        with open_any(directory, None) as control:
            parts: list[str | None] = [None] if control.exists(records.RUN) else []
            for name in sorted(name for name in control.names(_MOST_ROLES) if name.startswith(_ROLE)):
                with suppress(OSError, Unsafe), control.child(name) as of_role:
                    parts += [name] if of_role.exists(records.RUN) else []
            return parts
    except OSError:
        return []


def _made(directory: Path) -> Directory:
    try:
        return Directory.inside(directory, CONTROL)
    except FileNotFoundError:
        if not directory.exists():  # somebody has cleaned up
            os.makedirs(directory, exist_ok=True)
        with Directory.open(directory) as top:
            return top.child(CONTROL, create=_MODE)


def _fresh(directory: Directory) -> Directory:
    """Lists it, which makes a network file system ask its server for what it had cached."""
    with suppress(OSError):
        directory.names(1)
    return directory

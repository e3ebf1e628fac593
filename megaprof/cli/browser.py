"""The browser of whoever types the command, which is often on another machine."""

from __future__ import annotations

import getpass
import os
import shlex
import socket
import sys
import webbrowser
from pathlib import Path
from threading import Event, Thread

_LONG_ENOUGH_SECONDS = 2.0


def is_here() -> bool:
    """Returns whether a browser can be opened that the user sees. ``$BROWSER`` counts on every machine: editors that
    work on a remote machine set it to a program that opens the page on the user's own."""
    if os.environ.get("BROWSER"):
        return True
    if os.environ.get("SSH_CONNECTION") or os.environ.get("SSH_TTY"):
        return False
    if sys.platform not in ("darwin", "win32") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False  # what webbrowser finds then draws in this terminal
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True


def opened(address: str) -> bool:
    """Open it where a browser is; False where none could be. Some browsers are waited for until they are closed: one
    that is still there after a while has opened."""
    if not is_here():
        return False
    failed = Event()

    def ask() -> None:
        if not webbrowser.open(address):
            failed.set()

    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_LONG_ENOUGH_SECONDS)
    return not failed.is_set()


def fetching(path: Path) -> str:
    """The line that a user types on a machine of their own to have ``path`` there."""
    return shlex.join(["scp", f"{_login()}:{path.absolute()}", "."])


def forwarding(port: int) -> str:
    """The line that makes this machine's ``port`` one of the user's machine."""
    return shlex.join(["ssh", "-L", f"{port}:127.0.0.1:{port}", _login()])


def _login() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # a container's user without a name
        return socket.gethostname()

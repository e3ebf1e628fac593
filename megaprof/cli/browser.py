"""Opens the browser of the user who types the command; it is often on another machine."""

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
    """Returns whether a browser can be opened where the user sees it. ``$BROWSER`` counts on every machine: editors
    that work on a remote machine set it to a program that opens the page on the user's own machine."""
    if os.environ.get("BROWSER"):
        return True
    if os.environ.get("SSH_CONNECTION") or os.environ.get("SSH_TTY"):
        return False
    if sys.platform not in ("darwin", "win32") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False  # webbrowser would find only browsers that draw in this terminal
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True


def opened(address: str) -> bool:
    """Opens an address in the browser, and returns whether that worked. The call for some browsers returns only when
    they are closed, so a browser that still runs after a while counts as opened."""
    if not is_here():
        return False
    failed = Event()

    def open_page() -> None:
        if not webbrowser.open(address):
            failed.set()

    thread = Thread(target=open_page, daemon=True)
    thread.start()
    thread.join(_LONG_ENOUGH_SECONDS)
    return not failed.is_set()


def fetching(path: Path) -> str:
    """Returns the command that copies ``path`` to the user's own machine, to be typed there."""
    return shlex.join(["scp", f"{_login()}:{path.absolute()}", "."])


def forwarding(port: int) -> str:
    """Returns the command that forwards ``port`` of the user's own machine to this machine, to be typed there."""
    return shlex.join(["ssh", "-L", f"{port}:127.0.0.1:{port}", _login()])


def _login() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # a container's user without a name
        return socket.gethostname()

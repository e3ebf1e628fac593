"""Run as ``python two_users.py UID SCRIPT ...``: becomes another user, and then runs ``SCRIPT``.

Everything is imported before: the other user need not be able to read it.
"""

from __future__ import annotations

import colorsys
import contextlib
import gettext
import io
import locale
import logging
import os
import sys
from pathlib import Path

import megaprof.cli
import megaprof.cli.status
import megaprof.cli.trigger
import megaprof.cli.watch
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.control import places

assert colorsys
assert gettext
assert locale


def look(directory: str) -> None:
    """What the background thread of a job's lowest rank does at its first two looks."""
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.WARNING)
    listener = places.listening(Path(directory), WorldLayout(ParallelSizes(pp=2)), 0)
    for _ in range(2):
        listener.look()


if __name__ == "__main__":
    uid, action, *arguments = sys.argv[1:]
    if action != "look":  # what only parsing and refusing import, too
        with contextlib.redirect_stderr(io.StringIO()):
            megaprof.cli.main([action, os.devnull, *arguments[1:]])
    os.setgroups([])
    os.setgid(int(uid))
    os.setuid(int(uid))
    if action == "look":
        look(*arguments)
    else:
        sys.exit(megaprof.cli.main([action, *arguments]))

"""Run as ``python two_users.py UID SCRIPT ...``: becomes another user, and then runs ``SCRIPT``.

Everything is imported before: the other user need not be able to read it.
"""

from __future__ import annotations

import contextlib
import gettext
import io
import locale
import os
import sys
from pathlib import Path

import megaprof.cli
import megaprof.cli.jobs.status
import megaprof.cli.jobs.trigger
import megaprof.cli.jobs.watch
from megaprof.control.directory import ControlDirectory
from megaprof.control.gate import Gate
from megaprof.formats.files import Unsafe
from megaprof.formats.job.run import RunRecord
from megaprof.parallel.topology import ParallelSizes, WorldLayout

assert gettext
assert locale


def look(directory: str) -> None:
    """What the background thread of a job's lowest rank does at its first two looks."""
    layout = WorldLayout(ParallelSizes(pp=2))
    run = RunRecord.new(layout.coords(0), layout, ("train_actor",), None, 1.0)
    try:
        with ControlDirectory.own(Path(directory), None, None) as control:
            gate = Gate(control, run)
            gate.look(control)
            control.write(("run.json",), run.as_record())
            control.overwrite(("status", "rank00000.json"), {"run": run.run}, 512)
    except Unsafe as fault:
        print("unsafe:", fault)


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

"""Exports ``.nsys-rep`` reports to SQLite with this machine's ``nsys``, once per report, next to it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from megaprof.analysis.trace.decoding import Undecodable
from megaprof.formats.inputs import open_input
from megaprof.formats.names import temporary_path
from megaprof.formats.remote import RemotePath

SQLITE = ".sqlite"
_SECONDS = 600.0  # the least time limit; large files have more
_BYTES_A_SECOND = 500_000


def exported(path: Path) -> Path:
    """Returns the SQLite export of a report. A file that is an export already is returned as it is.

    Uses an export next to the report if it is not older than the report. Otherwise nsys makes one, which appears whole.
    Raises Undecodable and OSError.
    """
    if path.suffix == SQLITE:
        return path
    if isinstance(path, RemotePath):
        raise Undecodable(
            f"nsys exports no remote file: run 'nsys export --type sqlite' on it, and put the {SQLITE} next to it"
        )
    export_path = path.with_suffix(SQLITE)
    with open_input(path) as file:
        report_stat = os.fstat(file.fileno())
    if export_path.exists() and export_path.stat().st_mtime >= report_stat.st_mtime:
        return export_path
    nsys = shutil.which("nsys")
    if nsys is None:
        raise Undecodable(f"nsys is not on PATH here: run 'nsys export --type sqlite {path.name}' where it is")
    temporary = temporary_path(export_path)
    command = [nsys, "export", "--type=sqlite", "--force-overwrite=true", f"--output={temporary}", str(path)]
    try:
        completed = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS + report_stat.st_size / _BYTES_A_SECOND,
            check=False,
        )
        if completed.returncode or not temporary.exists():
            lines = (completed.stderr or completed.stdout).decode("utf-8", "replace").split("\n")
            why = next((line.strip() for line in reversed(lines) if line.strip()), "it says nothing")
            raise Undecodable(f"nsys export failed: {why[-200:]}")
        os.replace(temporary, export_path)
    except subprocess.TimeoutExpired:
        raise Undecodable("nsys export did not end") from None
    finally:
        temporary.unlink(missing_ok=True)
    return export_path

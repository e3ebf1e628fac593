"""``megaprof ui DIR``: captures and running jobs below a directory, as pages in the browser."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import tempfile
from pathlib import Path

from megaprof.cli import UsageError, add_input_option, local
from megaprof.cli.open import browser_is_here, forwarding, opened_in_browser
from megaprof.formats.phrases import Unanswerable, printable

#: The first port that is tried.
PORT = 8750
EXAMPLES = (
    "megaprof ui traces",
    "megaprof ui traces --allow-trigger",
    "megaprof ui traces --port 8750 --no-open   # on a cluster; it prints the ssh line",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "The server listens on 127.0.0.1 only and answers only with the address that it prints. It changes nothing, "
        "except that with --allow-trigger the live page can make a running job capture. Ctrl-C ends it."
    )
    parser.add_argument("dir", metavar="DIR", type=local, help="a --profile-dir, or a directory that contains several")
    parser.add_argument("--port", type=int, metavar="N", help=f"port (default: the first free one from {PORT} on)")
    parser.add_argument("--allow-trigger", action="store_true", help="let the live page make a running job capture")
    parser.add_argument("--no-open", action="store_true", help="do not open a browser")
    add_input_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serves until Ctrl-C. Raises Unanswerable."""
    if arguments.port is not None and not 0 <= arguments.port < 1 << 16:
        raise UsageError(f"--port {arguments.port} is not a number from 0 to 65535")
    if not arguments.dir.is_dir():
        raise Unanswerable(f"{arguments.dir} is not a directory")
    os.scandir(arguments.dir).close()  # an unreadable directory is reported here, not on every page
    if arguments.dir.resolve() == Path(arguments.dir.resolve().anchor):
        raise Unanswerable(f"{arguments.dir} is the whole file system; name the directory that holds the captures")
    from megaprof.ui.server import app, listen, serve

    token = secrets.token_urlsafe(24)
    try:
        listener = listen(arguments.port, PORT)
    except OSError as fault:
        subject = f"no port from {PORT} on can" if arguments.port is None else f"port {arguments.port} cannot"
        raise Unanswerable(f"{subject} be opened on 127.0.0.1: {fault.strerror or fault}") from None
    with listener, tempfile.TemporaryDirectory(prefix="megaprof-") as private:
        port = listener.getsockname()[1]
        address = f"http://127.0.0.1:{port}/?token={token}"
        try:
            serve(
                app(arguments.dir, token, arguments.allow_trigger),
                listener,
                lambda: _invite(arguments, address, port, Path(private)),
            )
        except KeyboardInterrupt:
            print(file=sys.stderr)
    return 0


def _invite(arguments: argparse.Namespace, address: str, port: int, private: Path) -> None:
    print(f"{printable(str(arguments.dir))}: {address}", flush=True)
    if not arguments.no_open and browser_is_here():
        # Other users can see the arguments that a browser is started with, and would see the token. So it opens a file
        # that only this user can read, and that leads to the address.
        page = private / "megaprof.html"
        refresh = f'<meta http-equiv="refresh" content="0; url={address}">'
        page.write_text(f'<!DOCTYPE html>{refresh}<a href="{address}">megaprof</a>')
        if opened_in_browser(page.as_uri()):
            print("Opened in the browser; Ctrl-C ends the server.", flush=True)
            return
    print("On your own machine, run this, then open the address there (Ctrl-C here ends the server):")
    print(f"  {forwarding(port)}", flush=True)

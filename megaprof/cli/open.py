"""``megaprof open DIR``: opens a captured step in Perfetto's UI, in the browser.

This works like Perfetto's own ``open_trace_in_ui``: the page fetches the file from this machine once, and then the
command ends. The trace is not uploaded anywhere. The page may fetch only from port 9001.
"""

from __future__ import annotations

import argparse
import errno
import getpass
import os
import re
import secrets
import shlex
import shutil
import socket
import sys
import tempfile
import webbrowser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

from megaprof.analysis.merge import is_merged
from megaprof.cli import say
from megaprof.cli.merge import add_source, merged_into, say_merged
from megaprof.formats.inputs import local_copy, open_input
from megaprof.formats.phrases import Unanswerable

PORT = 9001
PAGE = "https://ui.perfetto.dev"
_LOOK_SECONDS = 0.2
_LONG_ENOUGH_SECONDS = 2.0
EXAMPLES = (
    "megaprof open traces",
    "megaprof open traces --target train_actor --step 20",
    "megaprof open step.json.gz   # what megaprof merge wrote",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        f"The page fetches the trace from this machine once, from port {PORT}, and then the command ends. Without a "
        "browser, the command prints the ssh line and the address to open."
    )
    add_source(parser, "directory of captured traces, a single trace, or a file that megaprof merge wrote")


def run(arguments: argparse.Namespace) -> int:
    """Merges the step, unless the file is merged already, and waits until the page has fetched it."""
    if arguments.dir.is_file() and is_merged(arguments.dir):
        _hand_over(local_copy(arguments.dir), f"drag {arguments.dir} into the page")
        return 0
    with tempfile.TemporaryDirectory(prefix="megaprof-") as directory:
        merged = merged_into(arguments, out := Path(directory) / "step.json.gz")
        source = shlex.quote(str(arguments.dir))
        say_merged(merged, f"megaprof open {source}")
        instead = f"megaprof merge {source} -o FILE writes a file to drag into the page"
        _hand_over(out, instead, f"{merged.name}.json.gz")
    return 0


def _hand_over(path: Path, instead: str, name: str | None = None) -> None:
    """Serves the file until the page has fetched all of it. ``instead``: what to do if that is not possible."""
    # Other users of this machine can reach the port, but cannot guess the path.
    url_path = f"/{secrets.token_urlsafe(16)}/{re.sub(r'[^A-Za-z0-9_.-]+', '_', name or path.name)}"
    fetched = Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != url_path:
                self.send_error(404)
                return
            with open_input(path) as file:
                self.send_response(200)
                self.send_header("Content-Type", "application/octet-stream")
                self.send_header("Content-Length", str(path.stat().st_size))
                self.end_headers()
                shutil.copyfileobj(file, self.wfile)
            fetched.set()

        def do_OPTIONS(self) -> None:
            self.send_response(204)
            self.send_header("Access-Control-Allow-Private-Network", "true")
            self.end_headers()

        def end_headers(self) -> None:
            self.send_header("Access-Control-Allow-Origin", PAGE)
            self.send_header("Cache-Control", "no-cache")
            super().end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Logs nothing, to keep the user's terminal clean."""

    try:
        # A thread per connection, because browsers open connections in advance and send nothing on them.
        server = ThreadingHTTPServer(("127.0.0.1", PORT), Handler)
    except OSError as fault:
        if fault.errno != errno.EADDRINUSE:
            raise Unanswerable(f"port {PORT} cannot be opened: {fault.strerror or fault}") from None
        raise Unanswerable(
            f"port {PORT} is in use on this machine (by another megaprof open, or Perfetto's trace_processor), and "
            f"{PAGE} can fetch from no other port: {instead}"
        ) from None
    server.timeout = _LOOK_SECONDS
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a page that was closed may be opened again
    with server:
        address = f"{PAGE}/#!/?url=http://127.0.0.1:{server.server_port}{url_path}&referrer=open_trace_in_ui"
        if opened_in_browser(address):
            say(f"Opened in the browser; waiting until the page has fetched the trace (Ctrl-C to stop): {address}")
        else:
            say("No browser can be opened here. On your own machine, run:")
            say(f"  {forwarding(server.server_port)}")
            say("and open this address there (Ctrl-C here stops waiting):")
            say(f"  {address}")
        while not fetched.is_set():
            server.handle_request()
    say("The page has the complete trace.")


def browser_is_here() -> bool:
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


def opened_in_browser(address: str) -> bool:
    """Opens an address in the browser, and returns whether that worked. The call for some browsers returns only when
    they are closed, so a browser that still runs after a while counts as opened."""
    if not browser_is_here():
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

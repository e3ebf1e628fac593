"""What the tests of the pages share: directories to look at, and a client that has the token."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from megaprof.ui.captures import look_below
from megaprof.ui.server import app, server_of
from tests.analysis.synthetic import pipeline

TOKEN = "a-token-of-tests"
HERE = "http://127.0.0.1:8750"
VOID = {"meta", "br", "img", "link", "input", "hr"}
HOSTILE = "<img src=x onerror=alert(1)>'\"&amp;%2e%2e"


class Reader(HTMLParser):
    """The elements of a page and its text; fails on a tag that is closed without having been opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def make(top: Path) -> None:
    """Three captures below ``top``."""
    pipeline(top / "before", [6, 2])
    pipeline(top / "after", [4, 4])
    pipeline(top / HOSTILE, [5, 3], role=HOSTILE)


def address(top: Path, name: str) -> str:
    """What a place is called in addresses."""
    return next(place.id for place in look_below(top)[0].values() if place.name == name)


@contextmanager
def browsing(top: Path, **options: Any) -> Iterator[TestClient]:
    """A client that has entered by the address with the token."""
    with TestClient(app(top, TOKEN, **options), base_url=HERE) as client:
        assert client.get(f"/?token={TOKEN}").status_code == 200
        yield client


def page(client: TestClient, path: str) -> Reader:
    """The page, once the capture is read."""
    for _ in range(300):
        answer = client.get(path)
        if not re.search(r'http-equiv="refresh"', answer.text):
            assert answer.status_code == 200, answer.text
            return Reader(answer.text)
        time.sleep(0.1)
    raise AssertionError(f"{path} was never read")


@contextmanager
def serving(top: Path, at: int = 0, **options: Any) -> Iterator[int]:
    """A real server, for a real browser; its port, which is ``at`` where that is not 0."""
    with socket.socket() as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(("127.0.0.1", at))
        server = server_of(app(top, TOKEN, **options))
        thread = threading.Thread(target=lambda: server.run([opened]), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield opened.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(timeout=30)
            assert not thread.is_alive()

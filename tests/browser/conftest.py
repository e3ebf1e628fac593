"""A real browser, and a real server that it looks at."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_status import Job
from tests.ui.pages import TOKEN, make, serving

try:
    from playwright import sync_api
except ModuleNotFoundError:  # `make test` has no driver; a conftest cannot be skipped
    sync_api = None
_NAMES = "chromium", "chromium-browser", "google-chrome", "chromium-headless-shell"
CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)
#: `make test-ui` unpacks axe-core there.
AXE = Path(sys.prefix) / "package" / "axe.min.js"
RECENT = {
    "target": "train_actor",
    "steps": 8,
    "step_ms": 100.0,
    "forward_ms": 20.0,
    "backward_ms": 40.0,
    "combined_ms": 0.0,
    "compute_ms": 60.0,
    "finalize_ms": 5.0,
    "p2p_ms": 10.0,
}


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if sync_api is None:
        pytest.skip("playwright is not installed: make test-ui sets it up")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on PATH")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


class Living:
    """A job that is made of files and goes on."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.job = Job(directory)
        self.job.begin()
        self.step_ms = 100.0
        self._write(0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)
        self._thread.start()

    def _write(self, look: int) -> None:
        for rank in (0, 1):
            took = self.step_ms + 3 * (look % 5) + 10 * rank
            forward_ms = 20.0 + 15 * rank + look % 3
            passes = {"forward_ms": forward_ms, "compute_ms": forward_ms + RECENT["backward_ms"]}
            self.job.status(rank, recent=RECENT | {"step_ms": took} | passes)

    def _go_on(self) -> None:
        look = 0
        while not self._stop.wait(0.3):
            look += 1
            self._write(look)

    def end(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture(scope="session")
def living(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Living]:
    living = Living(tmp_path_factory.mktemp("top") / "job")
    yield living
    living.end()


@pytest.fixture(scope="session")
def top(living: Living) -> Path:
    """Captures beside a job that runs."""
    top = living.job.directory.parent
    make(top)
    return top


@pytest.fixture(scope="session")
def port(top: Path) -> Iterator[int]:
    with serving(top, allow_trigger=True) as port:
        yield port


Open = Callable[..., Any]


@pytest.fixture
def opened(browser: Any, port: int) -> Iterator[Open]:
    """Opens a page. Whatever the browser complains about fails the test, so does what the policy refuses."""
    complaints: list[str] = []
    contexts = []

    def open_page(path: str, *, scheme: str = "light", width: int = 1280, at: int | None = None) -> Any:
        context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda fault: complaints.append(str(fault)))
        here = f"http://127.0.0.1:{at or port}"
        page.goto(f"{here}/?token={TOKEN}")
        page.wait_for_url(f"{here}/")
        for _ in range(100):  # a capture that is not read yet says so
            page.goto(f"{here}{path}")
            if not page.locator("text=Reading ").count():
                break
            time.sleep(0.2)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not [said for said in complaints if "ERR_" not in said]  # a server that begins again

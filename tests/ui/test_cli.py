"""``megaprof ui`` as a user runs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPException
from http.cookiejar import CookieJar
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit

import pytest

from tests.analysis.synthetic import pipeline
from tests.cli.running import ROOT, megaprof

NONE = {"BROWSER": "", "DISPLAY": "", "WAYLAND_DISPLAY": "", "SSH_CONNECTION": "1.2.3.4 5 6.7.8.9 22"}


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def start(directory: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "megaprof", "ui", str(directory), "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", **environment},
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_it_prints_the_address_and_the_ssh_line_and_serves(
    tmp_path: Path, starting: list[subprocess.Popen[str]], number: signal.Signals
) -> None:
    pipeline(tmp_path / "run", [1, 1])
    process = start(tmp_path, "--no-open", **NONE)
    starting.append(process)
    assert process.stdout is not None
    first = process.stdout.readline().split()
    assert first[0] == f"{tmp_path}:"
    address = urlsplit(first[1])
    process.stdout.readline()
    assert process.stdout.readline().startswith(f"  ssh -L {address.port}:127.0.0.1:{address.port} ")
    with pytest.raises(HTTPError) as refused:
        urllib.request.urlopen(f"http://{address.netloc}/", timeout=30)
    assert refused.value.code == 403
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    assert browser.open(first[1], timeout=30).status == 200
    home = browser.open(f"http://{address.netloc}/", timeout=30).read().decode()
    (brief,) = re.findall(r"/brief/\w+", home)
    assert (
        browser.open(f"http://{address.netloc}{brief}", timeout=60).status == 200
    )  # read by a process of the server's
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as Ctrl-C in a terminal, which all its processes get
    else:
        process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said.strip()) == (0 if number == signal.SIGINT else -number, "")


def _heeds_ctrl_c(process: str) -> bool:
    """Returns whether the process has come so far that it catches or ignores Ctrl-C: until then, it just ends."""
    state = Path(f"/proc/{process}/status").read_text()
    return any(int(mask, 16) & 1 << signal.SIGINT - 1 for mask in re.findall(r"Sig(?:Cgt|Ign):\s*(\w+)", state))


def test_ctrl_c_while_pages_are_read_is_no_error(tmp_path: Path, starting: list[subprocess.Popen[str]]) -> None:
    """Processes that read have just been started, or import what they need, and requests wait for them."""
    for name in "abcd":
        pipeline(tmp_path / name, [1, 1])
    process = start(tmp_path, "--no-open", **NONE)
    starting.append(process)
    assert process.stdout is not None
    address = process.stdout.readline().split()[1]
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    browser.open(address, timeout=30)
    site = address.partition("/?")[0]
    briefs = re.findall(r"/brief/\w+", browser.open(f"{site}/", timeout=30).read().decode())
    assert len(briefs) == 4

    def read(brief: str) -> None:
        with suppress(OSError, HTTPException):
            browser.open(f"{site}{brief}", timeout=60)

    asking = [threading.Thread(target=read, args=[brief]) for brief in briefs]
    for thread in asking:
        thread.start()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until = time.monotonic() + 30
    while sum(map(_heeds_ctrl_c, children.read_text().split())) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=30)
    for thread in asking:
        thread.join()
    assert (process.returncode, said.strip()) == (0, "")


def test_the_browser_is_not_started_with_the_token(tmp_path: Path, starting: list[subprocess.Popen[str]]) -> None:
    seen = tmp_path / "seen"
    program = tmp_path / "browser"
    program.write_text(f'#!/bin/sh\necho "$@" > {seen}\n')
    program.chmod(0o755)
    process = start(tmp_path, BROWSER=f"{program} %s")
    starting.append(process)
    assert process.stdout is not None
    address = process.stdout.readline().split()[1]
    assert process.stdout.readline().startswith("Opened in the browser")
    opened = seen.read_text().strip()
    assert opened.startswith("file://")
    assert "token" not in opened
    page = Path(urlsplit(opened).path)
    assert address in page.read_text()
    assert page.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["nowhere"], 1, "nowhere is not a directory"),
        (["/"], 1, "the whole file system"),
        ([".", "--port", "99999"], 2, "--port 99999 is not a number from 0 to 65535"),
    ],
)
def test_what_cannot_be_served_is_one_line(arguments: list[str], code: int, says: str) -> None:
    ran = megaprof("ui", *arguments)
    assert ran.returncode == code
    assert says in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_without_the_extra_it_says_which(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules.update(starlette=None)\n")
    ran = subprocess.run(
        [sys.executable, "-m", "megaprof", "ui", str(tmp_path)],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (1, "megaprof ui: needs starlette: pip install 'megaprof[ui]'\n")

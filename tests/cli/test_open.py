"""``megaprof open`` and ``report --open`` as a user runs them, with a browser that is a program of the test's."""

from __future__ import annotations

import gzip
import json
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import unquote

import pytest

from megaprof.cli import open
from tests.analysis.exchanging import exchanging, write
from tests.analysis.synthetic import pipeline
from tests.cli.running import ROOT, megaprof

NONE = {"BROWSER": "", "DISPLAY": "", "WAYLAND_DISPLAY": "", "SSH_CONNECTION": "1.2.3.4 5 6.7.8.9 22"}


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    write(exchanging([0.0, 40.0]), tmp_path / "traces")
    return tmp_path / "traces"


@pytest.fixture
def port() -> int:
    """One that nobody else uses: tests of others run beside this one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def opening(port: int) -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def start(port: int, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """The command on another port than Perfetto's."""
    code = f"import megaprof.cli.open as o, megaprof.cli as c; o.PORT = {port}; raise SystemExit(c.main())"
    return subprocess.Popen(
        [sys.executable, "-c", code, "open", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", **environment},
        text=True,
    )


def address_in(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if (found := line.partition("https://ui.perfetto.dev/#!/?url=")[2]) != "":
            return found.partition("&")[0].strip()
    raise AssertionError(process.communicate())


def test_a_step_is_merged_and_handed_to_the_page_once(
    traces: Path, port: int, opening: list[subprocess.Popen[str]]
) -> None:
    process = start(port, traces, **NONE)
    opening.append(process)
    address = address_in(process)
    assert address.startswith(f"http://127.0.0.1:{port}/")
    assert address.endswith("/train_actor_step_5.json.gz")
    with pytest.raises(HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/train_actor_step_5.json.gz", timeout=30)
    with socket.create_connection(("127.0.0.1", port)):  # as browsers open them in advance, and say nothing
        with urllib.request.urlopen(urllib.request.Request(address, method="OPTIONS"), timeout=30) as answer:
            assert answer.headers["Access-Control-Allow-Private-Network"] == "true"
        with urllib.request.urlopen(address, timeout=30) as answer:
            assert answer.headers["Access-Control-Allow-Origin"] == "https://ui.perfetto.dev"
            events = json.loads(gzip.decompress(answer.read()))["traceEvents"]
        out, err = process.communicate(timeout=30)
    assert {event["pid"] for event in events} == {1, 2}
    assert (process.returncode, err) == (0, "")
    assert "The page has the complete trace." in out


def test_a_merged_timeline_is_handed_over_as_it_is(
    traces: Path, tmp_path: Path, port: int, opening: list[subprocess.Popen[str]]
) -> None:
    merged = tmp_path / "all of it.json"
    run = megaprof("merge", traces, "-o", merged)
    assert f"megaprof open {merged}" in run.stdout
    process = start(port, merged, **NONE)
    opening.append(process)
    address = address_in(process)
    assert address.endswith("/all_of_it.json")
    with urllib.request.urlopen(address, timeout=30) as answer:
        assert answer.read() == merged.read_bytes()
    assert process.wait(timeout=30) == 0


def test_the_browser_is_given_the_address_and_without_one_the_ssh_line_is_said(
    traces: Path, tmp_path: Path, port: int, opening: list[subprocess.Popen[str]]
) -> None:
    fetch = tmp_path / "browser.py"
    fetch.write_text(
        "import sys, urllib.request\n"
        "url = sys.argv[1].partition('?url=')[2].partition('&')[0]\n"
        f"open({str(tmp_path / 'got')!r}, 'wb').write(urllib.request.urlopen(url).read())\n"
    )
    process = start(port, traces, BROWSER=f"{sys.executable} {fetch} %s")
    opening.append(process)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "Opened in the browser" in out
    assert "traceEvents" in gzip.decompress((tmp_path / "got").read_bytes()).decode()
    process = start(port, traces, **NONE)
    opening.append(process)
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(6)]
    assert any(line.startswith(f"  ssh -L {port}:127.0.0.1:{port} ") for line in said), said


def test_a_port_in_use_is_one_line(traces: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        process = start(taken, traces, **NONE)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"port {taken} is in use on this machine" in err
    assert f": megaprof merge {traces} -o FILE" in err
    assert err.count("\n") == 1


def test_nothing_to_open_is_one_line(tmp_path: Path) -> None:
    run = megaprof("open", tmp_path)
    assert (run.returncode, run.stderr.count("\n")) == (1, 1)
    assert "holds no trace" in run.stderr


def test_the_page_is_opened_where_a_browser_is(tmp_path: Path) -> None:
    pipeline(tmp_path / "traces", [6, 2])
    note = tmp_path / "opened"
    browser = f"""{sys.executable} -c {shlex.quote(f"import sys; open({str(note)!r},'w').write(sys.argv[1])")} %s"""
    run = megaprof("report", tmp_path / "traces", "--open", BROWSER=browser)
    assert (run.returncode, run.stderr) == (0, "")
    until = time.monotonic() + 60
    while not (note.exists() and note.stat().st_size) and time.monotonic() < until:
        time.sleep(0.05)  # the command does not wait for a browser to end
    page = Path(unquote(note.read_text().removeprefix("file://")))
    assert "Stage 0 holds 6 layers" in page.read_text()
    assert f"Report as one HTML file: {page}\n" in run.stdout
    assert "scp " not in run.stdout
    page.unlink()
    page.parent.rmdir()


def test_without_a_browser_the_scp_line_is_said_and_json_stays_json(tmp_path: Path) -> None:
    pipeline(tmp_path / "traces", [6, 2])
    page = tmp_path / "report.html"
    run = megaprof("report", tmp_path / "traces", "--json", "-", "--html", page, "--open", **NONE)
    assert run.returncode == 0
    assert json.loads(run.stdout)["targets"][0]["slowest_stage"] == 0
    assert f":{page} ." in run.stderr
    assert "scp " in run.stderr
    run = megaprof("report", tmp_path / "traces", "--html", page, **NONE)
    assert (run.returncode, run.stderr) == (0, "")
    assert f"To see it in your browser: megaprof ui {tmp_path / 'traces'}\n" in run.stdout
    assert run.stdout.count(open.fetching(page)) == 1
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    run = megaprof("report", tmp_path / "traces", "--open", TMPDIR=str(scratch), **NONE)
    assert (run.returncode, list(scratch.iterdir())) == (0, []), "nothing is written that nobody can look at"
    assert run.stderr.endswith(f": megaprof ui {tmp_path / 'traces'}\n")
    (trace, _) = (tmp_path / "traces").iterdir()
    run = megaprof("report", trace, "--html", page, **NONE)
    assert "megaprof ui" not in run.stdout, "which shows directories of this machine alone"
    run = megaprof("report", trace, "--open", **NONE)
    assert run.stderr.endswith(f": megaprof report {trace} --html report.html\n")


@pytest.mark.parametrize(
    ("environment", "here"),
    [
        ({"DISPLAY": ":0", "SSH_CONNECTION": "1 2 3 4"}, False),
        ({"DISPLAY": ""}, False),
        ({"BROWSER": "true", "SSH_CONNECTION": "1 2 3 4"}, True),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="DISPLAY says nothing elsewhere")
def test_where_a_browser_is(environment: dict[str, str], here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NONE:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert open.browser_is_here() is here


def test_perfetto_fetches_from_this_port_alone() -> None:
    """Its page's Content-Security-Policy names http://127.0.0.1:9001."""
    assert open.PORT == 9001

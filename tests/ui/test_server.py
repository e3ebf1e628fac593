"""Every page, on made data."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from starlette.testclient import TestClient

from megaprof.analysis.report.diff import compare, prediction_clause
from megaprof.analysis.report.report import analyze
from megaprof.formats.names import artifact_name, shard
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from megaprof.ui import captures, server
from megaprof.ui.captures import Capture, KeptCaptures
from tests.analysis.scenarios import Scenario, write
from tests.analysis.synthetic import chunk, pipeline, plain_stage
from tests.ui.pages import HOSTILE, Reader, address, browsing, make, page


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("top")
    make(top)
    return top


@pytest.fixture(scope="module")
def client(top: Path) -> Iterator[TestClient]:
    with browsing(top) as client:
        yield client


def what_if(client: TestClient, top: Path, **query: object) -> Any:
    where = f"/capture/{address(top, 'before')}/what-if.json"
    return client.get(where, params={key: str(value) for key, value in query.items()}).json()


def test_the_list_names_every_capture_with_its_verdict(client: TestClient, top: Path) -> None:
    home = page(client, "/")
    for name in ("before", "after", HOSTILE):
        assert {"href": f"/capture/{address(top, name)}"} in home.all("a")
        assert name in home.text
    brief = Reader(client.get(f"/brief/{address(top, 'before')}").text)
    assert "layers of stage 0" in brief.text
    assert "imbalance 1.50" in brief.text
    # Once it is read the list has it at once, and the script has no reason to ask.
    cells = [cell.get("data-brief") for cell in page(client, "/").all("td")]
    assert f"/brief/{address(top, 'before')}" not in cells
    assert "layers of stage 0" in page(client, "/").text


def test_a_capture_is_the_report(client: TestClient, top: Path) -> None:
    where = f"/capture/{address(top, 'before')}"
    shown = page(client, where)
    assert "Stage 0 holds 6 layers" in shown.text
    links = [link["href"] for link in shown.all("a")]
    assert links[:2] == ["/", f"{where}/what-if"]
    policy = client.get(where).headers["content-security-policy"]
    (meta,) = [each["content"] for each in shown.all("meta") if each.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith(str(meta))
    assert "script-src 'sha256-" in policy
    assert "frame-ancestors 'none'" in policy


def test_no_page_of_ours_has_a_script_or_a_style_in_it(client: TestClient, top: Path) -> None:
    one, other = address(top, "before"), address(top, "after")
    for path in ("/", f"/capture/{one}/what-if", f"/compare?a={one}&b={other}", f"/live/{one}"):
        shown = page(client, path)
        assert not shown.all("style")
        assert all(each.get("src") or each.get("type") == "application/json" for each in shown.all("script")), path
        attributes = {name for _, each in shown.elements for name in each}
        assert not [name for name in attributes if name == "style" or name.startswith("on")], path


@pytest.mark.parametrize(
    "path",
    [
        "/nowhere",
        "/capture/0000000000000000",
        "/capture/..%2f..%2fetc%2fpasswd",
        "/capture/../../etc/passwd",
        "/live/%2fetc",
        "/static/../server.py",
        "/static/..%2fserver.py",
        "/brief/%00",
        "/capture/.",
        "/static/page.html",
        "/static/%00",
    ],
)
def test_only_what_is_listed_can_be_asked_for(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_it_only_reads(client: TestClient, top: Path) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        for path in ("/", f"/capture/{address(top, 'before')}", "/compare"):
            answer = client.request(method, path, headers={"origin": "http://127.0.0.1:8750"})
            assert answer.status_code == 405, (method, path)
    answer = client.post(f"/live/{address(top, 'before')}/capture", headers={"origin": "http://127.0.0.1:8750"})
    assert (answer.status_code, "--allow-trigger" in answer.text) == (403, True)


def test_hostile_names_are_text(client: TestClient, top: Path) -> None:
    hostile, other = address(top, HOSTILE), address(top, "before")
    for path in (
        "/",
        f"/capture/{hostile}",
        f"/capture/{hostile}/what-if",
        f"/compare?a={hostile}&b={other}",
        f"/live/{hostile}",
        f"/brief/{hostile}",
    ):
        shown = page(client, path)
        assert not shown.all("img"), path
        assert path.startswith("/brief") or HOSTILE in shown.text, path


def test_what_if_begins_with_the_captured_layout(client: TestClient, top: Path) -> None:
    shown = page(client, f"/capture/{address(top, 'before')}/what-if")
    fields = {field["name"]: field.get("value") for field in shown.all("input")}
    assert (fields["layout"], fields["microbatches"], fields["chunks"]) == ("Et*6|t*2L", "4", "1")
    assert "The captured layout: Et*6|t*2L" in shown.text
    moves = [link for link in shown.all("a") if link.get("class") == "move"]
    assert [link["aria-label"] for link in moves] == ["Move a layer to stage 1", "Move a layer to stage 0"]


def test_moves_lead_to_the_layout_that_the_report_advises(client: TestClient, top: Path) -> None:
    (target,) = analyze(top / "before").targets
    best = target.what_if.best
    assert best is not None
    shown = page(client, f"/capture/{address(top, 'before')}/what-if")
    for _ in range(2):
        (move,) = [link for link in shown.all("a") if link.get("id") == "later-0"]
        shown = page(client, str(move["href"]))
    (layout,) = [field["value"] for field in shown.all("input") if field["name"] == "layout"]
    assert layout == best.layout == "Et*4|t*4L"
    assert " ".join(best.flags) in shown.text
    answered = what_if(client, top, layout=layout)
    assert answered["fault"] is None
    assert f"{best.step_ms.value:.0f}" in Reader(answered["html"]).text
    assert parse_qs(answered["query"])["layout"] == [layout]


def test_a_drawing_comes_with_every_answer(client: TestClient, top: Path) -> None:
    before, after = what_if(client, top), what_if(client, top, layout="Et*4|t*4L")
    assert [row["stage"] for row in after["boxes"]["rows"]] == [0, 1]
    assert [len(row["boxes"]) for row in after["boxes"]["rows"]] == [5 * 2 * 4] * 2
    last = [max(row["span"][1] for row in each["boxes"]["rows"]) for each in (before, after)]
    assert last[1] < last[0] == before["boxes"]["end"] == after["boxes"]["end"]
    # The heading of the drawing says how long it is: the numbers above it are averages.
    heading = f"replayed: {last[0] / 1000:.0f} ms as captured, {last[1] / 1000:.0f} ms with this change"
    assert heading in Reader(after["html"]).text


def test_what_is_not_drawn_of_a_step_is_said_beside_its_time(tmp_path: Path) -> None:
    """The drawing ends before the step that is predicted."""
    write(Scenario("tail", layers=(6, 4), microbatches=4, dp=2, tail=100.0, steps=2), tmp_path / "tail")
    with browsing(tmp_path) as alone:
        shown = page(alone, f"/capture/{address(tmp_path, 'tail')}/what-if")
    assert "One captured step, replayed" in shown.text
    assert "It ends with the last pass, without the 100 ms of an average step that come after it." in shown.text


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ({"layout": "t*8|EL"}, "must begin with the embedding"),
        ({"layout": "Et*6|t*3L"}, "expected 8"),
        ({"layout": "Et*6|x"}, "unexpected 'x'"),
        ({"layout": "E" + "t" * 5000}, "longer than"),
        ({"layout": "(t*99999)*99999|L"}, "expands to more"),
        ({"microbatches": "many"}, "not a whole number"),
        ({"microbatches": "9" * 400}, "not a whole number"),
        ({"microbatches": "0"}, "between 1 and"),
        ({"p2p": "nan"}, "not a number of milliseconds"),
        ({"p2p": "1e400"}, "not a number of milliseconds"),
        ({"chunks": "99"}, "between 1 and 16"),
        ({"move": "0-9"}, "no move"),
        ({"move": "x"}, "not a whole number"),
        ({"move": "0-1-E"}, "no move"),
        ({"chunks": "2", "microbatches": "3"}, "interleaved"),
    ],
)
def test_what_cannot_be_says_why_and_changes_nothing(
    client: TestClient, top: Path, query: dict[str, str], says: str
) -> None:
    answered = what_if(client, top, **query)
    assert says in answered["fault"]
    assert "html" not in answered
    shown = page(client, f"/capture/{address(top, 'before')}/what-if?" + "&".join(f"{k}={v}" for k, v in query.items()))
    assert says in shown.text


def test_virtual_stages_split_the_layers_again(client: TestClient, top: Path) -> None:
    answered = what_if(client, top, chunks=2, was=1, layout="Et*6|t*2L")
    query = parse_qs(answered["query"])
    assert (query["layout"], query["chunks"]) == (["Et*2|t*2|t*2|t*2L"], ["2"])
    assert "--num-virtual-stages-per-pipeline-rank 2" in Reader(answered["html"]).text
    # A layout that is typed decides itself how many it has.
    typed = what_if(client, top, chunks=1, was=1, layout="Et|t*3|t*3|tL")
    assert parse_qs(typed["query"])["chunks"] == ["2"]


def test_layouts_to_begin_with_have_names_that_differ(tmp_path: Path) -> None:
    write(Scenario("before", layers=((5, 1), (1, 1)), microbatches=8, steps=3), tmp_path / "before")
    with browsing(tmp_path) as client:
        markup = what_if(client, tmp_path)["html"]
    names = re.findall(r'id="start-\d+"[^>]*>([^<]*)<', markup)
    assert "1 model chunk per stage, 4+4 layers" in names
    assert len(set(names)) == len(names)


def test_what_has_no_costs_says_so(client: TestClient, top: Path, tmp_path: Path) -> None:
    pipeline(tmp_path / "single", [4])
    with browsing(tmp_path) as alone:
        shown = page(alone, f"/capture/{address(tmp_path, 'single')}/what-if")
        assert "Nothing can be changed here." in shown.text
        assert "a single stage has no other one" in shown.text


def test_two_captures_are_compared_on_one_axis(client: TestClient, top: Path) -> None:
    one, other = address(top, "before"), address(top, "after")
    shown = page(client, f"/compare?a={one}&b={other}")
    diff = compare(analyze(top / "before"), analyze(top / "after")).targets[0]
    assert diff.prediction is not None
    assert prediction_clause(diff.prediction) in shown.text
    assert f"{diff.step_time.before:.0f} → {diff.step_time.after:.0f} ms" in shown.text
    timelines = [each for each in shown.all("div") if each.get("class") == "timeline"]
    assert len(timelines) == 2
    assert len({each["data-axis"] for each in timelines}) == 1
    text = client.get(f"/compare?a={one}&b={other}").text
    drawings = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert drawings[0]["end"] == drawings[1]["end"] == max(row["span"][1] for each in drawings for row in each["rows"])
    assert len([each for each in shown.all("svg") if "viewBox" not in each]) == 2 * 2  # stages, captures


def test_a_comparison_asks_for_the_other_capture(client: TestClient, top: Path) -> None:
    shown = page(client, f"/compare?a={address(top, 'before')}")
    assert "Choose the capture before a change and the one after it." in shown.text


def test_captures_without_a_common_target_are_not_compared(tmp_path: Path) -> None:
    pipeline(tmp_path / "a", [2, 2])
    pipeline(tmp_path / "b", [2, 2], target="train_log_probs")
    with browsing(tmp_path) as client:
        shown = page(client, f"/compare?a={address(tmp_path, 'a')}&b={address(tmp_path, 'b')}")
        assert "No target is in both" in shown.text


def test_a_link_out_of_the_directory_is_not_read(tmp_path: Path) -> None:
    (elsewhere, *_) = pipeline(tmp_path / "elsewhere", [1, 1])
    top = tmp_path / "top"
    pipeline(top / "run", [1, 1])
    (top / "run" / f"1{elsewhere.name}").symlink_to(elsewhere)
    with browsing(top) as client:
        answer = client.get(f"/capture/{address(top, 'run')}")
        assert answer.status_code == 422
        assert "a link that leads out of the directory" in Reader(answer.text).text
        assert "a link that leads out" in client.get(f"/brief/{address(top, 'run')}").text


def test_files_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "x.pt.trace.json").write_text("{")
    with browsing(tmp_path) as client:
        place = address(tmp_path, "bad")
        assert "holds no trace or timeline" in client.get(f"/brief/{place}").text
        assert client.get(f"/capture/{place}").status_code == 422
        assert client.get(f"/capture/{place}/what-if.json").json()["fault"]


def test_one_page_never_waits_for_anothers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def never(self: KeptCaptures, path: Path, links: Any, standstill: Any) -> Future[Capture]:
        asked.append(path)
        return Future()

    pipeline(tmp_path / "slow", [1, 1])
    monkeypatch.setattr(KeptCaptures, "_submit", never)
    with browsing(tmp_path) as client:
        slow = address(tmp_path, "slow")
        for _ in range(2):
            answer = client.get(f"/capture/{slow}")
            assert (answer.status_code, "Reading 2 files" in answer.text) == (200, True)
        assert client.get("/").status_code == 200
        assert asked == [tmp_path / "slow"], "what is being read is not read again"


def test_files_that_change_while_they_are_read_are_shown_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Future[Capture]] = []

    def slowly(self: KeptCaptures, path: Path, links: Any, standstill: Any) -> Future[Capture]:
        reads.append(Future())
        return reads[-1]

    monkeypatch.setattr(KeptCaptures, "_submit", slowly)
    monkeypatch.setattr(server, "_LISTED", 0.0)
    monkeypatch.setattr(server, "_PATIENCE", 0.2)
    with browsing(tmp_path) as client:
        for number in range(3):  # as a running job's do
            pipeline(tmp_path / "run", [number + 1, 1])
            time.sleep(0.01)
            assert "Reading 2 files" in client.get(f"/capture/{address(tmp_path, 'run')}").text
        assert len(reads) == 1
        reads[0].set_result(captures.read(tmp_path / "run", (), None))
        assert "train_actor" in client.get(f"/capture/{address(tmp_path, 'run')}").text
        assert "Reading 2 files" in client.get(f"/capture/{address(tmp_path, 'run')}").text
        assert len(reads) == 2


def test_what_was_read_is_kept_until_its_files_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[Path] = []
    submit = KeptCaptures._submit

    def counting(self: KeptCaptures, path: Path, links: Any, standstill: Any) -> Future[Capture]:
        submitted.append(path)
        return submit(self, path, links, standstill)

    monkeypatch.setattr(KeptCaptures, "_submit", counting)
    monkeypatch.setattr(captures, "MOST_KEPT", 2)
    monkeypatch.setattr(server, "_LISTED", 0.0)
    for name in ("a", "b", "c"):
        pipeline(tmp_path / name, [3, 1])
    with browsing(tmp_path) as client:
        for name in ("a", "a", "b", "c", "c"):
            page(client, f"/capture/{address(tmp_path, name)}")
        assert [path.name for path in submitted] == ["a", "b", "c"]
        page(client, f"/capture/{address(tmp_path, 'a')}")  # only two are kept
        assert [path.name for path in submitted[3:]] == ["a"]
        pipeline(tmp_path / "c", [2, 2])
        time.sleep(0.01)
        assert "2 layers against" not in page(client, f"/capture/{address(tmp_path, 'c')}").text
        assert [path.name for path in submitted[4:]] == ["c"]


def test_new_captures_appear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_LISTED", 0.0)
    with browsing(tmp_path) as client:
        assert "no capture and no job below this directory yet" in page(client, "/").text
        pipeline(tmp_path / "new", [1, 1])
        assert "new" in page(client, "/").text


@pytest.mark.slow
def test_a_run_of_16384_ranks_is_one_row(tmp_path: Path) -> None:
    layout = WorldLayout(ParallelSizes(pp=16, dp=1024))
    for rank in range(16384):
        coords = layout.coords(rank)
        folder = tmp_path / "large" / shard(coords.rank, coords.sizes.world)
        if not rank % 1024:
            folder.mkdir(parents=True)
        (folder / artifact_name("train_actor", None, 3, coords, ".timeline.bin")).touch()
    with browsing(tmp_path) as client:
        text = client.get("/").text
        assert "16384 timelines" in text
        assert len(text) < 20_000


@pytest.mark.slow
def test_a_capture_of_64_stages_stays_small(tmp_path: Path) -> None:
    """Page weight follows the stages, not the ranks."""
    for pp in range(64):
        holds = chunk(2 if pp else 3, embedding=pp == 0, loss=pp == 63)
        forward = 10.0 if pp else 15.0
        stage = plain_stage(
            pp, 64, forward, 2 * forward, start=0.1 * pp, chunks=[holds], microbatches=16, sizes={"dp": 256}
        )
        stage.write(tmp_path / "run")
    with browsing(tmp_path) as client:
        where = f"/capture/{address(tmp_path, 'run')}"
        page(client, where)
        assert len(client.get(where).content) < 1_000_000
        page(client, "/")
        assert len(client.get("/").content) < 20_000

"""Every page in Chromium: light and dark, wide and narrow, by keyboard alone, and what axe-core has to say."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from megaprof.analysis.report.report import analyze
from tests.browser.conftest import AXE, sync_api
from tests.ui.pages import HOSTILE, address, serving

PAGES = {
    "list": lambda top: "/",
    "report": lambda top: f"/capture/{address(top, 'before')}",
    "what-if": lambda top: f"/capture/{address(top, 'before')}/what-if",
    "compare": lambda top: f"/compare?a={address(top, 'before')}&b={address(top, 'after')}",
    "live": lambda top: f"/live/{address(top, 'job')}",
    "hostile": lambda top: f"/capture/{address(top, HOSTILE)}/what-if",
    "no what-if": lambda top: f"/capture/{address(top, 'job')}/what-if",
}
Path_ = Callable[[Path], str]
Open = Callable[..., Any]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", [name for name in PAGES if name != "no what-if"])
def test_pages_are_accessible_and_fit(opened: Open, top: Path, name: str, scheme: str, width: int) -> None:
    page = opened(PAGES[name](top), scheme=scheme, width=width)
    page.wait_for_load_state("load")
    if name == "list":
        page.wait_for_selector(".brief")
    sizes = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert sizes[0] <= sizes[1], "the page itself does not scroll sideways"
    if not AXE.is_file():
        pytest.skip("axe-core is not there: make test-ui sets it up")
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    told = [(each["id"], [node["html"][:150] for node in each["nodes"][:3]]) for each in found["violations"]]
    assert told == []


def until(page: Any, expression: str) -> None:
    """Wait for it. Playwright's own way of waiting needs a page that lets strings be run as scripts."""
    for _ in range(300):
        with suppress(sync_api.Error):  # while a form leads to another page
            if page.evaluate(expression):
                return
        time.sleep(0.1)
    raise AssertionError(expression)


def focus(page: Any, selector: str, most: int = 80) -> None:
    """Press Tab until it has the focus."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"{selector} is not reached by Tab")


def test_the_best_layout_is_found_with_the_keyboard_alone(opened: Open, top: Path) -> None:
    (target,) = analyze(top / "before").targets
    best = target.what_if.best
    assert best is not None
    page = opened("/")
    focus(page, f"a[href='/capture/{address(top, 'before')}/what-if']")
    page.keyboard.press("Enter")
    page.wait_for_selector("#tried")
    first = page.locator("#tried .tiles dd").first.inner_text()
    focus(page, "#later-0")
    for layers in (5, 4):
        page.keyboard.press("Enter")
        until(page, f"document.querySelector('[data-piece=\"0\"] .count').innerText === 'emb+{layers}'")
        assert page.evaluate("document.activeElement.id") == "later-0", "the focus stays where it was"
    assert page.locator("#flags").inner_text() == " ".join(best.flags)
    assert page.locator("#tried .tiles dd").first.inner_text() != first
    assert page.locator("input[name=layout]").input_value() == best.layout
    page.reload()  # the address has the setting
    assert page.locator("input[name=layout]").input_value() == best.layout


def test_layers_are_dragged_between_stages(opened: Open, top: Path) -> None:
    page = opened(PAGES["what-if"](top))
    page.drag_and_drop("[data-piece='0'] .layer[draggable] >> nth=0", "[data-piece='1']")
    until(page, "document.querySelector('[data-piece=\"1\"] .count').innerText === '3+loss'")
    assert page.locator("input[name=layout]").input_value() == "Et*5|t*3L"


def drawn(page: Any) -> int:
    """How much of the chart is drawn with the colour of a backward."""
    return int(
        page.evaluate("""() => {
        const canvas = document.querySelector('canvas');
        const all = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        let count = 0;
        for (let i = 0; i < all.length; i += 4) {
            if ([0xdd, 0x8b, 0x2b].every((value, part) => Math.abs(all[i + part] - value) < 9)) count++;
        }
        return count;
    }""")
    )


def test_fields_change_the_answer_and_the_chart_at_once(opened: Open, top: Path) -> None:
    page = opened(PAGES["what-if"](top))
    before = drawn(page)
    assert before > 1000
    page.locator("input[name=p2p]").fill("200")
    page.keyboard.press("Tab")
    until(page, "new URLSearchParams(location.search).get('p2p') === '200'")
    assert drawn(page) < before, "what is computed takes less of a longer step"
    page.locator("input[name=layout]").fill("t*8|EL")
    page.keyboard.press("Enter")
    until(page, "document.getElementById('fault').innerText.includes('must begin with the embedding')")
    assert page.locator("input[name=layout]").input_value() == "t*8|EL", "what was typed can be mended"
    page.locator("input[name=layout]").fill("Et*4|t*4L")
    page.keyboard.press("Enter")
    until(page, "document.getElementById('fault').innerText === ''")


def test_verdicts_come_into_the_list(opened: Open, top: Path) -> None:
    page = opened("/")
    page.wait_for_selector(".brief.slow")
    assert "layers of stage 0" in page.locator("table").inner_text()


def test_two_charts_share_their_axis(opened: Open, top: Path) -> None:
    page = opened(PAGES["compare"](top))
    pictures = "() => [...document.querySelectorAll('canvas')].map((canvas) => canvas.toDataURL())"
    before = page.evaluate(pictures)
    page.locator("canvas").first.focus()
    page.keyboard.press("+")
    page.wait_for_timeout(200)
    after = page.evaluate(pictures)
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_the_live_page_follows_its_job(opened: Open, top: Path, living: Any) -> None:
    page = opened(PAGES["live"](top))
    living.step_ms = 4321.0
    until(page, "document.getElementById('now').innerText.includes('43')")
    living.step_ms = 100.0
    assert page.locator("#capture").is_visible()
    running = living.job.run
    living.job.run = replace(running, ended=time.time())
    living.job.write_run()
    until(page, "document.getElementById('now').innerText.includes('has ended')")
    assert page.locator("#capture").is_hidden(), "a job that has ended captures nothing"
    living.job.run = running
    living.job.write_run()
    until(page, "document.getElementById('now').innerText.includes('The job runs')")
    assert page.locator("#capture").is_visible()


def test_the_live_page_survives_a_restart_of_the_server(opened: Open, top: Path, living: Any) -> None:
    with serving(top) as port:
        page = opened(PAGES["live"](top), at=port)
        until(page, "document.getElementById('connection').innerText.includes('updates')")
    until(page, "document.getElementById('connection').innerText.includes('tries again')")
    with serving(top, at=port):
        living.step_ms = 7654.0
        until(page, "document.getElementById('connection').innerText.includes('updates')")
        until(page, "document.getElementById('now').innerText.includes('766')")
    living.step_ms = 100.0
    page.context.close()


def test_a_capture_is_asked_for_with_the_button(opened: Open, top: Path, living: Any) -> None:
    page = opened(PAGES["live"](top))
    focus(page, "#capture button")
    page.keyboard.press("Enter")
    until(page, "document.getElementById('now').innerText.includes('waiting for 2 of 2')")
    request = living.job.paths.capture
    assert json.loads(request.read_text())["by"] == "megaprof ui"
    request.unlink()
    time.sleep(0.1)

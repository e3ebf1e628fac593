"""Who gets an answer, and who does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from megaprof.ui.server import app
from tests.ui.pages import HERE, TOKEN, browsing

PAGES = ["/", "/compare", "/brief/0", "/capture/0", "/capture/0/what-if", "/live/0", "/live/0/now", "/static/ui.js"]


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[TestClient]:
    with TestClient(app(tmp_path, TOKEN, True), base_url=HERE) as client:
        yield client


@pytest.mark.parametrize("path", [*PAGES, "/?token=", "/?token=wrong", f"/compare?token={TOKEN}", "/nowhere"])
def test_without_the_token_nothing_is_shown(stranger: TestClient, path: str) -> None:
    answer = stranger.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (403, "text/plain; charset=utf-8")
    assert "set-cookie" not in answer.headers


def test_with_the_token_a_cookie_comes_that_no_other_site_can_send(stranger: TestClient) -> None:
    answer = stranger.get(f"/?token={TOKEN}")
    name, _, rest = answer.headers["set-cookie"].partition("=")
    assert {part.strip().lower() for part in rest.split(";")[1:]} == {"httponly", "path=/", "samesite=strict"}
    assert TOKEN not in answer.text
    stranger.cookies.clear()
    assert stranger.get("/", headers={"cookie": f"{name}=wrong"}).status_code == 403
    assert stranger.get("/", headers={"cookie": f"{name}={TOKEN}"}).status_code == 200
    assert stranger.get("/", headers={"cookie": f"other={TOKEN}"}).status_code == 403


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example:8750",
        "localhost.evil.example",
        "127.0.0.1@evil.example",
        "",
        "0.0.0.0:80",
    ],
)
def test_another_name_for_this_machine_gets_nothing(stranger: TestClient, host: str) -> None:
    answer = stranger.get(f"/?token={TOKEN}", headers={"host": host})
    assert (answer.status_code, "set-cookie" in answer.headers) == (400, False)


@pytest.mark.parametrize("host", ["localhost:9999", "127.0.0.1", "[::1]:8750"])
def test_a_forwarded_port_is_this_machine_too(stranger: TestClient, host: str) -> None:
    assert stranger.get(f"/?token={TOKEN}", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "https://127.0.0.1:8750"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_a_request_from_another_page_gets_nothing(tmp_path: Path, headers: dict[str, str]) -> None:
    with browsing(tmp_path) as client:
        assert client.get("/", headers=headers).status_code == 403
        assert client.get("/", headers={"origin": HERE, "sec-fetch-site": "same-origin"}).status_code == 200


def test_a_link_with_the_token_may_be_anywhere(stranger: TestClient) -> None:
    assert stranger.get(f"/?token={TOKEN}", headers={"sec-fetch-site": "cross-site"}).status_code == 200


def test_what_changes_something_says_which_page_it_comes_from(tmp_path: Path) -> None:
    with browsing(tmp_path, allow_trigger=True) as client:
        assert client.post("/live/0/capture").status_code == 403
        assert client.post("/live/0/capture", headers={"origin": "http://evil.example"}).status_code == 403
        assert client.post("/live/0/capture", headers={"origin": HERE}).status_code == 404  # there is no such place


def test_every_answer_says_what_pages_may_do(tmp_path: Path) -> None:
    with browsing(tmp_path) as client:
        for path in ("/", "/nowhere", "/static/ui.js", f"/?token={TOKEN}"):
            headers = client.get(path).headers
            assert headers["content-security-policy"].startswith(
                "default-src 'none'; script-src 'self'; style-src 'self'"
            )
            assert "unsafe" not in headers["content-security-policy"]
            assert headers["x-frame-options"] == "DENY"
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "same-origin"
            assert headers["cache-control"] == "no-store"
            assert "access-control-allow-origin" not in headers

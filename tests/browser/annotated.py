"""The picture of docs/report.md: a page of the gallery with numbers at its parts.

`.venv/ui/bin/python -m tests.browser.annotated` writes docs/images/report-annotated.png again (`make test-ui` sets that
environment up; it needs Chromium).
"""

from __future__ import annotations

import shutil
import sys

from playwright.sync_api import sync_playwright

from tests.gallery import GALLERY

#: The elements that the numbers of docs/report.md#how-to-read-it point to, by what they contain.
PARTS = (
    "Stage 0 holds",
    "What if.",
    "step time",
    "Who computes what",
    "Where the time of a step goes",
    "How long microbatches take",
    "What if: before and after",
)
_MARKS = """(parts) => {
  document.body.style.paddingLeft = "76px";
  const all = [...document.querySelectorAll("h1, h2, h3, h4, p, dt, th, strong, b, div, span, figcaption, caption")];
  parts.map((part) => {
    const found = all.filter((each) => each.textContent.trim().startsWith(part) && each.offsetParent);
    const at = found.at(-1).getBoundingClientRect();
    return at.top + Math.min(at.height, 26) / 2 + scrollY;
  }).forEach((top, index) => {
    const mark = document.createElement("div");
    mark.textContent = index + 1;
    mark.style.cssText = `position:absolute;left:14px;top:${top - 14}px;width:28px;height:28px;border-radius:14px;` +
      "background:#7b1fa2;color:#fff;font:bold 15px/28px sans-serif;text-align:center";
    document.body.append(mark);
  });
}"""


def main(chromium: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1180, "height": 2280})
        page.goto((GALLERY / "unbalanced.html").as_uri())
        page.evaluate(_MARKS, PARTS)
        page.screenshot(path=GALLERY.parent / "images" / "report-annotated.png")


if __name__ == "__main__":
    found = sys.argv[1] if len(sys.argv) > 1 else shutil.which("chromium")
    main(found or sys.exit("no Chromium: give its path"))

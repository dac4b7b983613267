"""Take the pictures of the documentation: the web page of a running server, and a report, in light and dark.

    shoal serve --model nano --port 8080
    shoal bench --model nano --json bench.json --html report.html
    python -m scripts.pictures http://127.0.0.1:8080/ report.html

Needs playwright, Pillow and a Chromium (`scripts/browser`). Writes `docs/images/{page,report}-{light,dark}.webp`.
"""

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from tests.browser import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SIZE = {"width": 1280, "height": 880}
TEXTS = (
    "Good morning. The harbour is quiet, and the boats are still asleep.",
    "There was once a fisherman who never cast his net. Every morning he rowed out past the last buoy and listened.",
)
MAX_BYTES = 150_000
HALF_PLAYED = """() => {
  const { played, samples } = document.querySelector("#playback").dataset;
  return played > 0.45 * samples;
}"""


def main(url: str, report: Path) -> None:
    with chromium() as browser:
        for theme in ("light", "dark"):
            page = new_page(browser, theme)
            page.goto(url)
            speak(page)
            store(page, f"page-{theme}")
            page.goto(report.resolve().as_uri())
            store(page, f"report-{theme}")


def new_page(browser: "Browser", theme: str) -> "Page":
    return browser.new_context(viewport=SIZE, color_scheme=theme).new_page()  # type: ignore[arg-type]


def speak(page: "Page") -> None:
    """Speak two texts, play the second again and pause in the middle of it."""
    for text in TEXTS:
        page.wait_for_selector("#speak:enabled")
        page.fill("#text", text)
        page.click("#speak")
        page.wait_for_selector("#speak:not(.busy):enabled", timeout=120_000)
        page.wait_for_selector("#playback[data-state=ended]", timeout=120_000)
    page.focus("#wave")
    page.keyboard.press("Home")
    page.wait_for_function(HALF_PLAYED)
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")


def store(page: "Page", name: str) -> None:
    path = IMAGES / f"{name}.webp"
    Image.open(io.BytesIO(page.screenshot())).convert("RGB").save(path, quality=82, method=6)
    assert path.stat().st_size <= MAX_BYTES, f"{path.name} has {path.stat().st_size} bytes, more than {MAX_BYTES}"
    print(path.name, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

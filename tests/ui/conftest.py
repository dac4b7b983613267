"""The page in a real browser, against a real server process."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser import chromium
from tests.server.conftest import Serving, recording, start
from tests.waiting import TIMEOUT_SECONDS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["recording"]  # a fixture here, too

MAX_FRAMES = 40  # per turn: 1.6 seconds of audio
PATIENCE = int(1000 * TIMEOUT_SECONDS)  # milliseconds for any change of the page; it seldom takes one second


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """Open a browser per file: while it is open, tests cannot run event loops of their own."""
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    served = start(tmp_path_factory.mktemp("page"), slots=4)
    yield served
    assert served.end() == 0, served.log.read_text()


@pytest.fixture(scope="module")
def slow_serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server slow enough for a long text to be watched and stopped."""
    served = start(tmp_path_factory.mktemp("slow"), slots=4, backend="eager")
    yield served
    assert served.end() == 0, served.log.read_text()


# Limits the frames of a turn: a random model stops at no end of a text, and a test needs few of them. Done by the page:
# a route would hold every request, also those for the page's forty modules, until Playwright lets it go on.
SHORTEN = f"""(() => {{
  const {{ fetch }} = window;
  window.fetch = (url, options) => {{
    if (!String(url).endsWith("v1/tts")) return fetch(url, options);
    const body = JSON.stringify({{ ...JSON.parse(options.body), max_new_tokens: {MAX_FRAMES} }});
    return fetch(url, {{ ...options, body }});
  }};
}})()"""


Visit = Callable[..., "Page"]


@pytest.fixture
def visit(browser: "Browser", serving: Serving) -> Iterator[Visit]:
    """Open the page as a new visitor. Turns have at most MAX_FRAMES frames unless `limit` is False.

    Script errors and policy violations fail the test.
    """
    contexts, faults = [], []

    def notice(message: Any) -> None:
        if "Content Security Policy" in message.text:
            faults.append(message.text)

    def open_page(url: str = serving.url, *, ready: bool = True, limit: bool = True, **options: Any) -> "Page":
        settings: dict[str, Any] = {"reduced_motion": "reduce", "permissions": ["microphone"]}
        context = browser.new_context(**(settings | options))
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        if limit:
            context.add_init_script(SHORTEN)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", notice)
        page.goto(url)
        if ready:
            page.wait_for_selector("#speak:enabled")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []

"""A headless Firefox for the tests of the page, driven over WebDriver BiDi, which it speaks by itself.

Playwright drives only its own build of Firefox, and geckodriver is not packaged everywhere.
"""

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from tests.waiting import TIMEOUT_SECONDS, wait_until

NAMES = ("firefox-esr", "firefox")
LISTENING = "WebDriver BiDi listening on "
PREFERENCES = {
    "app.update.enabled": False,
    "browser.shell.checkDefaultBrowser": False,
    "browser.startup.page": 0,
    "datareporting.policy.dataSubmissionEnabled": False,
    "network.captive-portal-service.enabled": False,
    "network.proxy.type": 0,
    "toolkit.telemetry.enabled": False,
    "ui.prefersReducedMotion": 1,
}
ENTER, ARROW_RIGHT = "\ue007", "\ue014"


def executable() -> str | None:
    """Return the path of the browser: FIREFOX, or the first of NAMES on the PATH."""
    return os.environ.get("FIREFOX") or next((found for name in NAMES if (found := shutil.which(name))), None)


class Tab:
    """A page in Firefox. Every call raises AssertionError with Firefox's own message when it fails."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection, self._numbers = connection, itertools.count()
        self.command("session.new", capabilities={})
        self._id: str = self.command("browsingContext.getTree")["contexts"][0]["context"]

    def command(self, method: str, **parameters: Any) -> Any:
        """Send a command and return its result. Events on the way are not of interest."""
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while (answer := json.loads(self._connection.recv(timeout=TIMEOUT_SECONDS))).get("id") != number:
            pass
        assert answer["type"] == "success", f"{method}: {answer}"
        return answer["result"]

    def before_every_page(self, function: str) -> None:
        """Call a JavaScript function in every page before its own scripts."""
        self.command("script.addPreloadScript", functionDeclaration=function)

    def open(self, url: str) -> None:
        self.command("browsingContext.navigate", context=self._id, url=url, wait="complete")

    def reload(self) -> None:
        self.command("browsingContext.reload", context=self._id, wait="complete")

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, which JSON can hold."""
        return json.loads(self._evaluate(f"JSON.stringify(({expression}) ?? null)")["value"])

    def wait_for(self, expression: str) -> None:
        wait_until(lambda: self.run(f"Boolean({expression})"), lambda: expression, interval=0.1)

    def click(self, selector: str) -> None:
        """Press the mouse on an element, as a user does: only that may start sound."""
        self.wait_for(f"document.querySelector({json.dumps(selector)})?.checkVisibility()")
        node = self._evaluate(f"document.querySelector({json.dumps(selector)})")
        self._evaluate(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{ block: 'center' }})")
        origin = {"type": "element", "element": {"sharedId": node["sharedId"]}}
        mouse = [
            {"type": "pointerMove", "x": 0, "y": 0, "origin": origin},
            {"type": "pointerDown", "button": 0},
            {"type": "pointerUp", "button": 0},
        ]
        self._act("pointer", mouse)

    def press(self, *keys: str) -> None:
        self._act("key", [{"type": step, "value": key} for key in keys for step in ("keyDown", "keyUp")])

    def _act(self, kind: str, actions: list[dict[str, Any]]) -> None:
        source = {"type": kind, "id": kind, "actions": actions}
        self.command("input.performActions", context=self._id, actions=[source])

    def _evaluate(self, expression: str) -> dict[str, Any]:
        answer = self.command("script.evaluate", expression=expression, target={"context": self._id}, awaitPromise=True)
        assert answer["type"] == "success", f"{expression}: {answer}"
        result: dict[str, Any] = answer["result"]
        return result


@contextmanager
def firefox(home: Path) -> Iterator[Tab]:
    """Open a Firefox with a profile under `home`. Skips the test where there is none."""
    path = executable()
    if path is None:
        pytest.skip("needs a Firefox: install firefox-esr, or set FIREFOX to one")
    home.mkdir()
    lines = (f"user_pref({json.dumps(name)}, {json.dumps(value)});\n" for name, value in PREFERENCES.items())
    (home / "user.js").write_text("".join(lines), encoding="utf-8")
    log = home / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [path, "--headless", "--no-remote", "--profile", str(home), "--remote-debugging-port", "0"],
            stdout=out,
            stderr=out,
            env=os.environ | {"HOME": str(home), "MOZ_CRASHREPORTER_DISABLE": "1"},
        )
    try:
        wait_until(lambda: LISTENING in log.read_text() or process.poll() is not None, log.read_text, interval=0.1)
        assert process.poll() is None, log.read_text()
        url = log.read_text().partition(LISTENING)[2].split()[0]
        with connect(f"{url}/session", proxy=None, max_size=None, open_timeout=TIMEOUT_SECONDS) as connection:
            yield Tab(connection)
    finally:
        process.terminate()
        process.wait(TIMEOUT_SECONDS)

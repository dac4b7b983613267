"""The server's log, with the lines of its engine process in it."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.server.logging import JsonLines, LogFormat, TextLines, set_up_logging
from shoal.server.run import client_url
from tests.server.conftest import ROOT, Serving, free_port, surroundings
from tests.waiting import wait_until

# Like `tests.server.launch`, but the audio guard of the engine process rejects the first attempt.
LAUNCH = """
from tests.engine.rigged import reject_the_first

if __name__ == "__mp_main__":
    reject_the_first()
if __name__ == "__main__":
    from shoal.cli import main
    main()
"""


def heard_by_a_server(home: Path, format: LogFormat) -> list[str]:
    """Return the log of a server after one request that was retried."""
    script, log, port = home / "launch.py", home / "log", free_port()
    script.write_text(LAUNCH)
    flags = ["--model", "nano", "--port", str(port), "--set", f"log_format={format}", "--set", "slots=2"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, script, "serve", *flags],
            stdout=out,
            stderr=out,
            env=surroundings(home) | {"PYTHONPATH": str(ROOT)},
        )
    serving = Serving(process, f"http://127.0.0.1:{port}", log, home)
    try:
        serving.wait_until_ready()
        asked = serving.client().post("/v1/tts", json={"text": "Hello."}, headers={"x-request-id": "tried-twice"})
        assert asked.status_code == 200
    finally:
        assert serving.end() == 0, log.read_text()
    return log.read_text().splitlines()


def test_log_lines_of_the_engine_are_json_with_the_request_id(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in heard_by_a_server(tmp_path, "json")]
    [weights] = [line for line in lines if line["message"].startswith("weights: ")]
    assert (weights["logger"], weights["level"]) == ("shoal.engine.load", "info")
    assert "request_id" not in weights
    [again] = [line for line in lines if "retrying with another seed" in line["message"]]
    assert (again["logger"], again["level"], again["request_id"]) == (
        "shoal.engine.request_tracker",
        "warning",
        "tried-twice",
    )


def test_log_lines_of_the_engine_can_be_text(tmp_path: Path) -> None:
    lines = heard_by_a_server(tmp_path, "text")
    [again] = [line for line in lines if "retrying with another seed" in line]
    assert "WARNING shoal.engine.request_tracker: utterance " in again
    assert again.endswith(" [tried-twice]")


def test_the_log_says_how_the_weights_are_quantized(server: Serving, http: httpx.Client) -> None:
    wait_until(lambda: '"message": "weights: ' in server.log.read_text(), server.log.read_text)


@pytest.mark.parametrize("formatter", [JsonLines(), TextLines()])
def test_a_formatted_traceback_is_logged(formatter: logging.Formatter) -> None:
    record = logging.makeLogRecord({"name": "shoal", "msg": "it broke", "exc_text": "Traceback: here"})
    written = formatter.format(record)
    assert "it broke" in written
    assert "Traceback: here" in written


@pytest.mark.parametrize(
    ("format", "terminal", "formatter"),
    [("auto", True, TextLines), ("auto", False, JsonLines), ("json", True, JsonLines), ("text", False, TextLines)],
)
def test_the_log_is_text_on_a_terminal(
    format: LogFormat, terminal: bool, formatter: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[logging.Handler] = []
    monkeypatch.setattr(logging, "basicConfig", lambda handlers, **rest: installed.extend(handlers))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    set_up_logging(format, "info")
    assert isinstance(installed[0].formatter, formatter)


def test_the_address_for_clients_of_this_machine() -> None:
    urls = [client_url(host, 80) for host in ("127.0.0.1", "0.0.0.0", "::", "::1", "10.1.2.3")]
    assert urls == [f"http://{name}:80" for name in ("127.0.0.1", "127.0.0.1", "[::1]", "[::1]", "10.1.2.3")]
